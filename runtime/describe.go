package runtime

import (
	"encoding/json"
	"fmt"
)

// maxInfo bounds the description in a verbose status: with the rest of the reply
// it must stay below the 16 MiB that clients take.
const maxInfo = 12 << 20

// describe makes a verbose status of info. Where that is too long, omit leaves
// parts out, the one named first first, and says so in info.
func describe(what string, info any, omit ...func()) (map[string]string, error) {
	for {
		b, err := json.Marshal(info)
		if err != nil {
			return nil, fmt.Errorf("describe %s: %w", what, err)
		}
		if len(b) <= maxInfo || len(omit) == 0 {
			return map[string]string{"info": string(b)}, nil
		}
		omit[0]()
		omit = omit[1:]
	}
}
