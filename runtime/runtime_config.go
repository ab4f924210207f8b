package runtime

import (
	"context"
	"fmt"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// UpdateRuntimeConfig is told the node's range of pod addresses. With a template
// (cni.conf_template) and no other network configuration, it makes one of it;
// else it has nothing to do.
func (s *Service) UpdateRuntimeConfig(_ context.Context, req *cri.UpdateRuntimeConfigRequest) (*cri.UpdateRuntimeConfigResponse, error) {
	cidr := req.GetRuntimeConfig().GetNetworkConfig().GetPodCidr()
	if cidr == "" {
		return &cri.UpdateRuntimeConfigResponse{}, nil
	}
	file, err := s.Network.ApplyPodCIDR(cidr)
	if err != nil {
		return nil, fmt.Errorf("runtime_config.network_config: %w", err)
	}
	if file != "" {
		s.Log.WithField("podCIDR", cidr).WithField("file", file).Info("network configuration made from the template")
	}
	return &cri.UpdateRuntimeConfigResponse{}, nil
}
