package spec

import (
	"regexp"
	"strconv"
	"strings"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// numberLike is what some reader might take for a number: decimal with or
// without sign, or 0x, 0o, 0b and digits. Names of that form are never looked
// up: an image's passwd could say that "4294967296" is root, while whoever
// checked the image took it for a number.
var numberLike = regexp.MustCompile(`^[+-]?([0-9][0-9_]*|0[xX][0-9a-fA-F_]*|0[oO][0-9_]*|0[bB][0-9_]*)$`)

// ID is a user or group as written: a number, or a name to look up.
type ID struct {
	Number uint32
	Name   string // empty: Number counts
}

// ParseID reads one user or group. Digits alone are a decimal number from 0 to
// MaxID (leading zeros do not make it octal); any other number-like form, and
// anything that cannot stand in a passwd file, is ErrInvalid.
func ParseID(field, s string) (ID, error) {
	if isDigits(s) {
		n, err := strconv.ParseUint(s, 10, 64)
		if err != nil || n > MaxID {
			return ID{}, Invalid(field, s, "must be between 0 and 2147483647")
		}
		return ID{Number: uint32(n)}, nil
	}
	switch {
	case s == "":
		return ID{}, Invalid(field, "", "missing")
	case numberLike.MatchString(s):
		return ID{}, Invalid(field, s, "looks like a number but is none that a user or group may have")
	case len(s) > 255 || strings.ContainsAny(s, ":/\n\r\x00"):
		return ID{}, Invalid(field, s, "cannot be a name")
	}
	return ID{Name: s}, nil
}

// ParseImageUser reads an image's USER: "user", "user:group", ":group" (root
// with that group) or nothing (root). group is nil when there is none. ErrInvalid.
func ParseImageUser(s string) (user ID, group *ID, err error) {
	const field = "image User"
	name, groupName, _ := strings.Cut(s, ":")
	if name != "" {
		if user, err = ParseID(field, name); err != nil {
			return ID{}, nil, err
		}
	}
	if groupName == "" {
		return user, nil, nil
	}
	g, err := ParseID(field, groupName)
	if err != nil {
		return ID{}, nil, err
	}
	return user, &g, nil
}

// ImageUser is an image's USER as ImageStatus shows it: a uid, or a name. A
// user that no container can run as is shown as a name, so that a kubelet which
// must know that the user is not root refuses it.
func ImageUser(s string) (uid *cri.Int64Value, username string) {
	user, _, err := ParseImageUser(s)
	name, _, _ := strings.Cut(s, ":")
	switch {
	case err != nil || user.Name != "":
		return nil, name
	case name == "":
		return nil, ""
	}
	return &cri.Int64Value{Value: int64(user.Number)}, ""
}
