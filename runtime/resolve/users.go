package resolve

import (
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/cyphar/filepath-securejoin/pathrs-lite"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/oci/spec"
)

const (
	// userFileMax bounds a rootfs's passwd and group file.
	userFileMax = 4 << 20
	// groupsMax is the kernel's NGROUPS_MAX.
	groupsMax = 65536

	userField     = "linux.security_context.run_as_user"
	usernameField = "linux.security_context.run_as_username"
)

// passwdEntry is a line of /etc/passwd whose ids are kept as text until they
// are used: a broken line harms only the user it names.
type passwdEntry struct{ name, uid, gid, home string }

// groupEntry is a line of /etc/group.
type groupEntry struct {
	name, gid string
	members   []string
}

func resolveUser(r Request) (spec.User, error) {
	sc := r.Config.GetLinux().GetSecurityContext()
	id, group, field, err := wantedUser(r, sc)
	if err != nil {
		return spec.User{}, err
	}
	passwd, err := readPasswd(r.Rootfs)
	if err != nil {
		return spec.User{}, err
	}
	groups, err := readGroup(r.Rootfs)
	if err != nil {
		return spec.User{}, err
	}
	user, err := findUser(field, id, passwd)
	if err != nil {
		return spec.User{}, err
	}
	if g := sc.GetRunAsGroup(); g != nil {
		group = &spec.ID{Number: uint32(g.GetValue())}
	}
	if group != nil {
		if user.GID, err = findGroup(*group, groups); err != nil {
			return spec.User{}, err
		}
	}
	user.AdditionalGIDs, err = additionalGroups(user, sc, groups)
	return user, err
}

// wantedUser is what the request or, if it is silent, the image asks for, with
// the name of the field that said so.
func wantedUser(r Request, sc *cri.LinuxContainerSecurityContext) (spec.ID, *spec.ID, string, error) {
	if u := sc.GetRunAsUser(); u != nil {
		return spec.ID{Number: uint32(u.GetValue())}, nil, userField, nil
	}
	if name := sc.GetRunAsUsername(); name != "" {
		id, err := spec.ParseID(usernameField, name)
		return id, nil, usernameField, err
	}
	if r.Image == nil {
		return spec.ID{}, nil, "image User", nil
	}
	id, group, err := spec.ParseImageUser(r.Image.Config.User)
	return id, group, "image User", err
}

func findUser(field string, id spec.ID, passwd []passwdEntry) (spec.User, error) {
	for _, e := range passwd {
		if id.Name != "" && e.name != id.Name {
			continue
		}
		uid, uidErr := parseNumber(e.uid)
		if id.Name == "" && (uidErr != nil || uid != id.Number) {
			continue
		}
		gid, gidErr := parseNumber(e.gid)
		if uidErr != nil || gidErr != nil {
			return spec.User{}, spec.Invalid(field, e.name, fmt.Sprintf("the image's passwd gives it the ids %s:%s, which are out of range", e.uid, e.gid))
		}
		return spec.User{UID: uid, GID: gid, Username: e.name, Home: e.home}, nil
	}
	if id.Name != "" {
		return spec.User{}, spec.Invalid(field, id.Name, "no such user in the image's /etc/passwd")
	}
	return spec.User{UID: id.Number}, nil
}

func findGroup(id spec.ID, groups []groupEntry) (uint32, error) {
	if id.Name == "" {
		return id.Number, nil
	}
	for _, e := range groups {
		if e.name != id.Name {
			continue
		}
		gid, err := parseNumber(e.gid)
		if err != nil {
			return 0, spec.Invalid("image User", id.Name, "the image's group file gives it the id "+e.gid+", which is out of range")
		}
		return gid, nil
	}
	return 0, spec.Invalid("image User", id.Name, "no such group in the image's /etc/group")
}

func additionalGroups(user spec.User, sc *cri.LinuxContainerSecurityContext, groups []groupEntry) ([]uint32, error) {
	gids := []uint32{user.GID}
	for _, g := range sc.GetSupplementalGroups() {
		gids = append(gids, uint32(g))
	}
	if sc.GetSupplementalGroupsPolicy() == cri.SupplementalGroupsPolicy_Merge && user.Username != "" {
		for _, e := range groups {
			if !slices.Contains(e.members, user.Username) {
				continue
			}
			gid, err := parseNumber(e.gid)
			if err != nil {
				return nil, spec.Invalid("image group", e.name, "has the id "+e.gid+", which is out of range")
			}
			gids = append(gids, gid)
		}
	}
	slices.Sort(gids)
	gids = slices.Compact(gids)
	if len(gids) > groupsMax {
		return nil, spec.Invalid("linux.security_context.supplemental_groups", len(gids), "the kernel takes 65536 groups at most")
	}
	return gids, nil
}

func parseNumber(s string) (uint32, error) {
	n, err := strconv.ParseUint(s, 10, 64)
	if err == nil && n > spec.MaxID {
		err = strconv.ErrRange
	}
	return uint32(n), err
}

func readPasswd(rootfs string) ([]passwdEntry, error) {
	lines, err := readLines(rootfs, "/etc/passwd")
	var list []passwdEntry
	for _, line := range lines {
		if f := strings.Split(line, ":"); len(f) >= 6 && f[0] != "" {
			list = append(list, passwdEntry{name: f[0], uid: f[2], gid: f[3], home: f[5]})
		}
	}
	return list, err
}

func readGroup(rootfs string) ([]groupEntry, error) {
	lines, err := readLines(rootfs, "/etc/group")
	var list []groupEntry
	for _, line := range lines {
		if f := strings.Split(line, ":"); len(f) >= 3 && f[0] != "" {
			e := groupEntry{name: f[0], gid: f[2]}
			if len(f) > 3 && f[3] != "" {
				e.members = strings.Split(f[3], ",")
			}
			list = append(list, e)
		}
	}
	return list, err
}

func readLines(rootfs, name string) ([]string, error) {
	data, err := readInRoot(rootfs, name, userFileMax)
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.ENOTDIR) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var lines []string
	for line := range strings.Lines(string(data)) {
		lines = append(lines, strings.TrimRight(line, "\r\n"))
	}
	return lines, nil
}

// readInRoot reads a regular file of a hostile tree. It is first opened by path
// only: opening a FIFO or a device node for reading could block or do harm.
func readInRoot(rootfs, name string, most int64) ([]byte, error) {
	handle, err := pathrs.OpenInRoot(rootfs, name)
	if err != nil {
		return nil, fmt.Errorf("open %s in the container's rootfs: %w", name, err)
	}
	defer handle.Close()
	info, err := handle.Stat()
	if err != nil {
		return nil, fmt.Errorf("stat %s in the container's rootfs: %w", name, err)
	}
	if !info.Mode().IsRegular() {
		return nil, spec.Invalid("image file", name, "is no regular file")
	}
	file, err := pathrs.Reopen(handle, os.O_RDONLY)
	if err != nil {
		return nil, fmt.Errorf("open %s in the container's rootfs: %w", name, err)
	}
	defer file.Close()
	data, err := io.ReadAll(io.LimitReader(file, most+1))
	if err != nil {
		return nil, fmt.Errorf("read %s in the container's rootfs: %w", name, err)
	}
	if int64(len(data)) > most {
		return nil, spec.Invalid("image file", name, fmt.Sprintf("is longer than %d bytes", most))
	}
	return data, nil
}
