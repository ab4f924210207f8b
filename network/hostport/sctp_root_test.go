package hostport

import (
	"context"
	"encoding/binary"
	"hash/crc32"
	"net"
	"testing"
	"time"

	"berth/sandbox/leakcheck"
	"berth/sandbox/namespaces"
)

// sctpInit is the packet that begins an SCTP association (RFC 9260, section 3).
func sctpInit(from, to uint16) []byte {
	b := binary.BigEndian.AppendUint16(nil, from)
	b = binary.BigEndian.AppendUint16(b, to)
	b = append(b, make([]byte, 8)...)                             // verification tag, checksum
	b = append(b, 1, 0, 0, 20)                                    // INIT, 20 bytes
	b = append(b, 1, 2, 3, 4, 0, 1, 0, 0, 0, 1, 0, 1, 0, 0, 0, 1) // tag, window, streams, first TSN
	binary.LittleEndian.PutUint32(b[8:], crc32.Checksum(b, crc32.MakeTable(crc32.Castagnoli)))
	return b
}

// SCTP is led on too. Kernels of containers' nodes have it as a module, many test
// machines not at all, so packets are made and read by hand.
func TestSCTP(t *testing.T) {
	n := newNode(t)
	n.open("a", n.newPod("a"), mapping("sctp", "", 8080, 80))
	for _, c := range []struct{ network, host string }{{"ip4:132", outside4}, {"ip6:132", outside6}} {
		var pod net.PacketConn
		must(t, namespaces.Enter(n.path("a"), func() (err error) {
			pod, err = net.ListenPacket(c.network, "")
			return err
		}))
		var client net.Conn
		must(t, namespaces.Enter(n.path("outside"), func() (err error) {
			client, err = new(net.Dialer).DialContext(context.Background(), c.network, c.host)
			return err
		}))
		_, err := client.Write(sctpInit(5000, 8080))
		must(t, err)
		must(t, pod.SetReadDeadline(time.Now().Add(leakcheck.Patience(3*time.Second))))
		packet := make([]byte, 200)
		size, _, err := pod.ReadFrom(packet)
		if err != nil {
			t.Errorf("%s: nothing arrives: %v", c.host, err)
		} else if got, want := packet[:size], sctpInit(5000, 80); string(got) != string(want) {
			t.Errorf("%s: %x arrives, want %x", c.host, got, want)
		}
		client.Close()
		pod.Close()
	}
	must(t, n.Close("a"))
	n.gone("Close")
}
