package runtime

import (
	"context"
	"fmt"
	"path/filepath"

	"berth/runtime/admin"
)

// adminService is what the operator can ask for (see package admin): one line
// for each verb.
var adminService = admin.Service(
	admin.Serve(admin.ImportImage, (*Service).importImage),
	admin.Serve(admin.Pulls, (*Service).pulls),
)

// importImage reads a docker or OCI archive that lies on the node.
func (s *Service) importImage(ctx context.Context, req *admin.ImportRequest) (*admin.ImportReply, error) {
	if !filepath.IsAbs(req.Path) {
		return nil, fmt.Errorf("%w: path %q is not absolute", errInvalid, req.Path)
	}
	names, err := s.Images.Import(ctx, req.Path)
	if err != nil {
		return nil, err
	}
	return &admin.ImportReply{Images: names}, nil
}
