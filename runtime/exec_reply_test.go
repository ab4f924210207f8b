package runtime

import "testing"

// A reply must fit the client's message limit, whatever each stream has.
func TestFitReply(t *testing.T) {
	for _, tc := range []struct{ out, err, room, wantOut, wantErr int }{
		{10, 10, 100, 10, 10},
		{100, 0, 100, 100, 0},
		{200, 0, 100, 100, 0},
		{200, 30, 100, 70, 30},
		{30, 200, 100, 30, 70},
		{200, 200, 100, 50, 50},
		{0, 200, 100, 0, 100},
	} {
		out, err := fitReply(make([]byte, tc.out), make([]byte, tc.err), tc.room)
		if len(out) != tc.wantOut || len(err) != tc.wantErr {
			t.Errorf("%+v: got %d, %d", tc, len(out), len(err))
		}
	}
}
