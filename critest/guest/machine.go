package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// errGuest: the machine did not come up or ended before its script did.
var errGuest = errors.New("the guest failed")

const (
	memory = 2048 // MiB
	cores  = 2
)

// arguments of the kernel: cgroup v2 and AppArmor on; the rest saves emulated time.
const arguments = "console=ttyS0 panic=-1 quiet loglevel=3 systemd.show_status=false systemd.log_target=kmsg " +
	"net.ifnames=0 nokaslr mitigations=off nowatchdog no_timer_check tsc=reliable random.trust_cpu=on " +
	"rcupdate.rcu_expedited=1 cryptomgr.notests systemd.unified_cgroup_hierarchy=1 apparmor=1 security=apparmor"

// machine is one qemu. Its methods are for one goroutine, which must be locked to
// its thread: the helpers end with that thread.
type machine struct {
	dir     string // temporary: sockets, the console's text
	qemu    *exec.Cmd
	ended   chan error
	monitor *qmp
	control net.Conn
	lines   *bufio.Reader // of control
	output  net.Conn
	helpers []*exec.Cmd
}

// drive says what a machine boots from or goes on from.
type drive struct {
	image, disk string // folder of the image; file of the root filesystem
	write       bool   // keep the changes in disk
	append      string // more kernel arguments
	resume      bool   // wait for a state instead of booting
	memory      *os.File
}

// accelerator returns qemu's arguments for the processor, and whether it is
// emulated. /dev/kvm without the processor's flags is a nested one that executes a
// stock kernel by interpretation, slower than qemu's own translation.
func accelerator() (args []string, emulated bool) {
	info, err := os.ReadFile("/proc/cpuinfo")
	flags := string(info)
	if err == nil && (strings.Contains(flags, " vmx ") || strings.Contains(flags, " svm ")) {
		if dev, err := os.OpenFile("/dev/kvm", os.O_RDWR, 0); err == nil {
			_ = dev.Close()
			return []string{"-accel", "kvm", "-cpu", "host"}, false
		}
	}
	// A model without AVX and SMAP: emulating those costs half as much again. Without
	// cmpxchg16b, because qemu 7.2 gets its flags wrong and newer kernels stop at boot.
	return []string{"-accel", "tcg,thread=multi,tb-size=512", "-cpu", "Nehalem,cx16=off"}, true
}

// pair returns two ends of a connection, one to give to qemu.
func pair() (ours net.Conn, theirs *os.File, err error) {
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("make a connection to qemu: %w", err)
	}
	mine := os.NewFile(uintptr(fds[0]), "guest")
	defer mine.Close()
	theirs = os.NewFile(uintptr(fds[1]), "guest")
	if ours, err = net.FileConn(mine); err != nil {
		return nil, nil, errors.Join(fmt.Errorf("make a connection to qemu: %w", err), theirs.Close())
	}
	return ours, theirs, nil
}

// start starts qemu and what serves the folders to it; run attaches them. The
// caller calls close also on an error, when a machine came with it.
func start(d drive, folders []string) (*machine, error) {
	m := &machine{ended: make(chan error, 1)}
	var err error
	if m.dir, err = os.MkdirTemp("", "guest-"); err != nil {
		return nil, fmt.Errorf("make the guest's folder: %w", err)
	}
	if err := m.serve(folders); err != nil {
		return m, err
	}
	args := m.command(d)
	for i := range folders {
		args = append(args, "-chardev", fmt.Sprintf("socket,id=folder%d,path=%s", i, m.socket(i)))
	}
	m.qemu = exec.Command("qemu-system-x86_64", args...)
	m.qemu.ExtraFiles = []*os.File{d.memory}
	var monitor net.Conn
	for _, end := range []*net.Conn{&monitor, &m.control, &m.output} {
		ours, theirs, err := pair()
		if err != nil {
			return m, err
		}
		defer theirs.Close()
		*end = ours
		m.qemu.ExtraFiles = append(m.qemu.ExtraFiles, theirs)
	}
	var said strings.Builder
	m.qemu.Stdout, m.qemu.Stderr = &said, &said
	// A session of its own: Ctrl-C at the terminal is for this program, which ends qemu.
	m.qemu.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Pdeathsig: syscall.SIGKILL}
	if err := m.qemu.Start(); err != nil {
		return m, fmt.Errorf("%w: start qemu: %w", errGuest, err)
	}
	go func() {
		err := m.qemu.Wait()
		m.ended <- fmt.Errorf("%w: qemu ended (%v): %s", errGuest, err, strings.TrimSpace(said.String()))
	}()
	m.lines = bufio.NewReader(m.control)
	if m.monitor, err = newQMP(monitor); err != nil {
		return m, errors.Join(err, m.why())
	}
	return m, nil
}

// command is qemu's: no device that the guest does not use. Descriptors: 3 memory,
// 4 monitor, 5 control, 6 output.
func (m *machine) command(d drive) []string {
	processor, _ := accelerator()
	disk := fmt.Sprintf("file=%s,format=raw,if=none,id=root,cache=unsafe", d.disk)
	if !d.write {
		disk += ",snapshot=on"
	}
	args := append([]string{"-name", "berth-guest", "-M", "pc,usb=off,vmport=off,hpet=off,smm=off",
		"-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-nic", "none",
		"-smp", strconv.Itoa(cores), "-m", strconv.Itoa(memory),
		"-object", fmt.Sprintf("memory-backend-file,id=memory,size=%dM,mem-path=/proc/self/fd/3,share=on", memory),
		"-numa", "node,memdev=memory",
		"-kernel", filepath.Join(d.image, "vmlinux"), "-initrd", filepath.Join(d.image, "initrd"),
		"-append", strings.TrimSpace(arguments + " " + d.append),
		"-drive", disk, "-device", "virtio-blk-pci,drive=root",
		"-device", "vmgenid,guid=auto", "-device", "virtio-rng-pci", "-device", "virtio-serial-pci",
		"-chardev", "socket,id=monitor,fd=4", "-mon", "chardev=monitor,mode=control",
		"-chardev", "socket,id=control,fd=5", "-device", "virtserialport,chardev=control,name=control",
		"-chardev", "socket,id=output,fd=6", "-device", "virtserialport,chardev=output,name=output",
		"-serial", "file:" + filepath.Join(m.dir, "console"),
	}, processor...)
	if d.resume {
		args = append(args, "-incoming", "defer")
	}
	return args
}

func (m *machine) socket(i int) string { return filepath.Join(m.dir, fmt.Sprintf("folder%d", i)) }

// expect reads the agent's next line, which must begin with word, and returns the rest.
func (m *machine) expect(ctx context.Context, word string) (string, error) {
	stop := context.AfterFunc(ctx, func() { _ = m.control.SetReadDeadline(time.Now()) })
	defer stop()
	line, err := m.lines.ReadString('\n')
	if cause := context.Cause(ctx); cause != nil {
		return "", fmt.Errorf("%w: wait for %q of the agent: %w", errGuest, word, cause)
	}
	if err != nil {
		return "", errors.Join(fmt.Errorf("%w: wait for %q of the agent: %w", errGuest, word, err), m.why())
	}
	rest, ok := strings.CutPrefix(strings.TrimSpace(line), word)
	if !ok {
		return "", fmt.Errorf("%w: the agent says %q, not %q", errGuest, strings.TrimSpace(line), word)
	}
	return strings.TrimSpace(rest), nil
}

// run gives the script to the agent, attaches the folders that helpers serve,
// copies the output and returns the script's exit status.
func (m *machine) run(ctx context.Context, script string, output io.Writer) (int, error) {
	copied := make(chan error, 1)
	go func() {
		_, err := io.Copy(output, m.output)
		copied <- err
	}()
	if _, err := fmt.Fprintf(m.control, "script %d\n%s", len(script), script); err != nil {
		return 0, errors.Join(fmt.Errorf("%w: send the script: %w", errGuest, err), m.why())
	}
	if _, err := m.expect(ctx, "taken"); err != nil {
		return 0, err
	}
	for i := range m.helpers {
		device := map[string]any{"driver": "vhost-user-fs-pci", "id": fmt.Sprintf("fs%d", i),
			"chardev": fmt.Sprintf("folder%d", i), "tag": fmt.Sprintf("folder%d", i), "queue-size": 1024}
		if err := m.monitor.do("device_add", device, nil); err != nil {
			return 0, err
		}
	}
	text, err := m.expect(ctx, "exit ")
	if err != nil {
		return 0, err
	}
	status, err := strconv.Atoi(text)
	if err != nil {
		return 0, fmt.Errorf("%w: its exit status is %q", errGuest, text)
	}
	// What the script wrote is in the connection already: the agent spoke after it.
	if err := m.monitor.do("quit", nil, nil); err != nil && !errors.Is(err, io.EOF) {
		return 0, err
	}
	return status, <-copied
}

// why returns what qemu said when it has ended or ends soon, else the console's end.
func (m *machine) why() error {
	select {
	case err := <-m.ended:
		m.ended <- err
		return err
	case <-time.After(2 * time.Second):
	}
	text, err := os.ReadFile(filepath.Join(m.dir, "console"))
	if err != nil {
		return fmt.Errorf("read the guest's console: %w", err)
	}
	return fmt.Errorf("its console ends with: %s", text[max(0, len(text)-2000):])
}

// close ends qemu and the helpers and removes the folder. It may be called twice.
func (m *machine) close() error {
	if m.qemu != nil && m.qemu.Process != nil {
		_ = m.qemu.Process.Kill() // it may have ended
		m.ended <- <-m.ended
	}
	for _, h := range m.helpers {
		_ = h.Process.Kill() // it ends with qemu
		_ = h.Wait()         // by the signal
	}
	m.helpers = nil
	for _, c := range []net.Conn{m.control, m.output} {
		if c != nil {
			_ = c.Close() // nobody reads it any more
		}
	}
	if err := os.RemoveAll(m.dir); err != nil {
		return fmt.Errorf("remove the guest's folder: %w", err)
	}
	return nil
}
