package runtime

import (
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/sirupsen/logrus"
)

// maxTroubles bounds the troubles that are kept word by word.
const maxTroubles = 50

// beginning is what became of the start, for Status.
type beginning struct {
	quarantined []string      // where unreadable records were moved; written before serving
	took        time.Duration // until lists were true; written before serving
	tidied      chan struct{} // closed when nothing of an earlier daemon is left to undo
	collected   chan struct{} // closed when CNI's GC is over, or not wanted

	mu       sync.Mutex
	waiting  map[string]adoptee // could not be adopted yet, guarded by mu
	troubles []string           // the first of them, guarded by mu
	trouble  int                // how many there were, guarded by mu
}

// wait keeps an object for another try, or drops it.
func (r *beginning) wait(a adoptee, again bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if again {
		r.waiting[a.ID] = a
	} else {
		delete(r.waiting, a.ID)
	}
}

// left are the objects that wait.
func (r *beginning) left() []adoptee {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Collect(maps.Values(r.waiting))
}

// beginningInfo is how Status shows it.
type beginningInfo struct {
	Seconds     float64  `json:"seconds"` // from the reading of the records until lists were true
	Tidied      bool     `json:"tidied"`  // what an earlier daemon left is undone, as far as it can be
	Quarantined []string `json:"quarantined"`
	Unadopted   []string `json:"unadopted"`
	Trouble     int      `json:"trouble"`
	Troubles    []string `json:"troubles"` // the first of them
}

func (r *beginning) info() beginningInfo {
	r.mu.Lock()
	defer r.mu.Unlock()
	i := beginningInfo{Seconds: r.took.Seconds(), Quarantined: append([]string{}, r.quarantined...),
		Unadopted: slices.Sorted(maps.Keys(r.waiting)), Trouble: r.trouble, Troubles: append([]string{}, r.troubles...)}
	select {
	case <-r.tidied:
		i.Tidied = true
	default:
	}
	return i
}

// troubled logs and counts what could not be restored or undone.
func (s *Service) troubled(fields logrus.Fields, err error, what string) {
	s.Log.WithError(err).WithFields(fields).Warn(what)
	r := &s.beginning
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.trouble++; len(r.troubles) >= maxTroubles {
		return
	}
	text := what
	for _, kind := range slices.Sorted(maps.Keys(fields)) {
		if id, ok := fields[kind].(string); ok {
			text += ", " + kind + " " + id
		}
	}
	r.troubles = append(r.troubles, readable(text+": "+err.Error()))
}
