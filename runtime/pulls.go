package runtime

import (
	"context"
	"time"

	"github.com/sirupsen/logrus"

	"berth/image"
	"berth/runtime/admin"
)

// pulls answers from memory.
func (s *Service) pulls(context.Context, *admin.PullsRequest) (*admin.PullsReply, error) {
	reply := &admin.PullsReply{Pulls: []admin.Pull{}}
	for _, p := range s.Images.Progress() {
		reply.Pulls = append(reply.Pulls, describePull(p, time.Now()))
	}
	return reply, nil
}

func describePull(p image.Progress, now time.Time) admin.Pull {
	out := admin.Pull{
		Op: p.Op, Image: p.Image, Began: p.Began, Ended: !p.Ended.IsZero(), Stage: string(p.Stage), ID: p.ID,
		Bytes: p.Bytes, Total: p.Total, Rate: p.Rate, Layers: []admin.PullLayer{},
	}
	if out.Ended {
		now = p.Ended
	}
	out.Seconds = now.Sub(p.Began).Seconds()
	if p.Err != nil {
		out.Error = p.Err.Error()
	}
	out.Left = seconds(p.Left())
	for _, l := range p.Layers {
		out.Layers = append(out.Layers, admin.PullLayer{Blob: l.Blob.String(), Stage: string(l.Stage),
			Bytes: l.Bytes, Total: l.Total, Resumed: l.Resumed, Rate: l.Rate, Left: seconds(l.Left())})
	}
	return out
}

func seconds(d time.Duration, known bool) *float64 {
	if !known {
		return nil
	}
	s := d.Seconds()
	return &s
}

const (
	slowPull  = 10 * time.Second // so old is a pull that the log tells of, and so often it does
	lookPulls = 2 * time.Second  // so often it is looked for one
)

// watchPulls tells the log of slow pulls until the service closes.
func (s *Service) watchPulls() {
	tick := time.NewTicker(lookPulls)
	defer tick.Stop()
	for last := time.Now(); ; {
		select {
		case <-tick.C:
			now := time.Now()
			for _, p := range s.Images.Progress() {
				if p.Ended.IsZero() && now.Sub(p.Began)/slowPull > max(last.Sub(p.Began), 0)/slowPull {
					s.logSlowPull(&p, now)
				}
			}
			last = now
		case <-s.closing:
			return
		}
	}
}

func (s *Service) logSlowPull(p *image.Progress, now time.Time) {
	log := s.Log.WithFields(logrus.Fields{"image": p.Image, "for": now.Sub(p.Began).Round(time.Second), "stage": p.Stage,
		"bytes": p.Bytes, "total": p.Total, "rate": int64(p.Rate)})
	if p.Total > 0 {
		log = log.WithField("percent", p.Bytes*100/p.Total)
	}
	if left, ok := p.Left(); ok {
		log = log.WithField("left", left.Round(time.Second))
	}
	if l := slowestLayer(p.Layers); l != nil {
		log = log.WithFields(logrus.Fields{"layer": l.Blob, "layerStage": l.Stage, "layerBytes": l.Bytes, "layerTotal": l.Total})
	}
	log.Info(p.Op + " is slow")
}

// slowestLayer is the one with the most to come, nil when there is none.
func slowestLayer(layers []image.LayerProgress) (slowest *image.LayerProgress) {
	var most int64 = -1
	for i, l := range layers {
		if l.Stage != image.StageDone && l.Stage != image.StageReused && l.Total-l.Bytes > most {
			slowest, most = &layers[i], l.Total-l.Bytes
		}
	}
	return slowest
}
