package hostport

import (
	"net/netip"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// isFamily ends a rule for packets of the other family.
func isFamily(f family) []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: 1},
		&expr.Cmp{Register: 1, Op: expr.CmpOpEq, Data: []byte{f.proto}},
	}
}

// loadKey puts the key of a packet into registers from the given one on: its
// destination address (precise), protocol and port.
func loadKey(f family, precise bool, at uint32) []expr.Any {
	var load []expr.Any
	if precise {
		load = append(load, &expr.Payload{DestRegister: at, Base: expr.PayloadBaseNetworkHeader, Offset: f.dest, Len: f.address})
		at += f.address / 4
	}
	return append(load,
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: at},
		&expr.Payload{DestRegister: at + 1, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2})
}

// leaveLoopback6 lets packets to ::1 alone: unlike IPv4, the kernel forwards none
// of them whatever its settings, so a translation would only lose them.
func leaveLoopback6() []expr.Any {
	f := families[1]
	return append(isFamily(f),
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: f.dest, Len: f.address},
		&expr.Cmp{Register: 1, Op: expr.CmpOpEq, Data: netip.IPv6Loopback().AsSlice()},
		&expr.Verdict{Kind: expr.VerdictReturn})
}

// markNear marks what comes from the near link of the pod that has the port.
func markNear(f family, precise bool, near *nftables.Set) []expr.Any {
	rule := append(isFamily(f), &expr.Meta{Key: expr.MetaKeyIIFNAME, Register: register})
	rule = append(rule, loadKey(f, precise, register+unix.IFNAMSIZ/4)...)
	return append(rule,
		&expr.Lookup{SourceRegister: register, SetName: near.Name, SetID: near.ID},
		&expr.Meta{Key: expr.MetaKeyMARK, Register: 1},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4,
			Mask: binaryutil.NativeEndian.PutUint32(^uint32(markBit)), Xor: binaryutil.NativeEndian.PutUint32(markBit)},
		&expr.Meta{Key: expr.MetaKeyMARK, SourceRegister: true, Register: 1})
}

// leadOn translates the destination to what the map has for it.
func leadOn(f family, precise bool, ports *nftables.Set) []expr.Any {
	rule := append(isFamily(f), loadKey(f, precise, register)...)
	return append(rule,
		&expr.Lookup{SourceRegister: register, DestRegister: register, IsDestRegSet: true, SetName: ports.Name, SetID: ports.ID},
		&expr.NAT{Type: expr.NATTypeDestNAT, Family: uint32(f.proto), RegAddrMin: register, RegProtoMin: register + f.address/4})
}

// masquerades are the rules of postrouting.
func masquerades() [][]expr.Any {
	marked := []expr.Any{
		&expr.Meta{Key: expr.MetaKeyMARK, Register: 1},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4,
			Mask: binaryutil.NativeEndian.PutUint32(markBit), Xor: binaryutil.NativeEndian.PutUint32(0)},
		&expr.Cmp{Register: 1, Op: expr.CmpOpEq, Data: binaryutil.NativeEndian.PutUint32(markBit)},
		&expr.Masq{},
	}
	const statusDNAT = 1 << 5 // IPS_DST_NAT
	loopback := append([]expr.Any{
		&expr.Ct{Key: expr.CtKeySTATUS, Register: 1},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4,
			Mask: binaryutil.NativeEndian.PutUint32(statusDNAT), Xor: binaryutil.NativeEndian.PutUint32(0)},
		&expr.Cmp{Register: 1, Op: expr.CmpOpNeq, Data: binaryutil.NativeEndian.PutUint32(0)},
	}, append(inLoopback(families[0].source), &expr.Masq{})...)
	return [][]expr.Any{marked, loopback}
}

// guards are the rules of guard.
func guards() [][]expr.Any {
	var rules [][]expr.Any
	for _, offset := range []uint32{families[0].dest, families[0].source} {
		rule := []expr.Any{
			&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: 1},
			&expr.Cmp{Register: 1, Op: expr.CmpOpNeq, Data: []byte(ifname("lo"))},
		}
		rules = append(rules, append(append(rule, inLoopback(offset)...), &expr.Verdict{Kind: expr.VerdictDrop}))
	}
	return rules
}

// inLoopback matches an IPv4 address in 127.0.0.0/8.
func inLoopback(offset uint32) []expr.Any {
	return append(isFamily(families[0]),
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: 1},
		&expr.Cmp{Register: 1, Op: expr.CmpOpEq, Data: netip.MustParseAddr("127.0.0.0").AsSlice()[:1]})
}
