package main

import (
	"fmt"
	"io"
	"os"
	"regexp"
	"slices"
	"strings"

	"github.com/onsi/ginkgo/v2/types"
)

// rule names specs that need not pass, and why.
type rule struct {
	pattern string // of the spec's whole text
	reason  string
}

// excluded specs are not run: what they test is not built yet.
var excluded = []rule{
	{`benchmark`, "benchmarks are no conformance"},
}

// allowedSkips are specs that may skip themselves here. Any other skip counts
// as a failure: a runtime can look green by skipping.
var allowedSkips = kernelSkips("/sys/module/apparmor/parameters/enabled")

// kernelSkips are what this kernel cannot run. appArmor is the file in which it
// says that it has AppArmor.
func kernelSkips(appArmor string) []rule {
	if b, err := os.ReadFile(appArmor); err == nil && strings.HasPrefix(string(b), "Y") {
		return nil
	}
	return []rule{{`AppArmor`, "the kernel here has no AppArmor"}}
}

// match finds the rule for a spec.
func match(rules []rule, text string) (rule, bool) {
	for _, r := range rules {
		if regexp.MustCompile(r.pattern).MatchString(text) {
			return r, true
		}
	}
	return rule{}, false
}

// skipFlag is the excluded rules as one regular expression for ginkgo.
func skipFlag() string {
	var parts []string
	for _, r := range excluded {
		parts = append(parts, "("+r.pattern+")")
	}
	return strings.Join(parts, "|")
}

// row is one group's line of the table.
type row struct {
	group                             string
	passed, failed, skipped, excluded int
	seconds                           float64
}

// result is what a run amounted to.
type result struct {
	rows     []row
	reasons  map[string][]string // reason: the specs
	failures []types.SpecReport
	badSkips []types.SpecReport
}

// judge sorts every spec of a report. A spec outside focus (not run, and not
// excluded by us) is left out when partial is set, else it is a bad skip.
func judge(reports []types.Report, partial bool) result {
	res := result{reasons: map[string][]string{}}
	rows := map[string]*row{}
	for _, report := range reports {
		for _, s := range report.SpecReports {
			if s.LeafNodeType != types.NodeTypeIt {
				if s.State.Is(types.SpecStateFailureStates) {
					res.failures = append(res.failures, s)
				}
				continue
			}
			text := s.FullText()
			ours, isExcluded := match(excluded, text)
			if partial && s.State.Is(types.SpecStateSkipped) && s.Failure.Message == "" && !isExcluded {
				continue
			}
			r := rows[groupOf(s)]
			if r == nil {
				r = &row{group: groupOf(s)}
				rows[r.group] = r
			}
			r.seconds += s.RunTime.Seconds()
			allowed, isAllowed := match(allowedSkips, text)
			switch {
			case s.State.Is(types.SpecStatePassed):
				r.passed++
			case s.State.Is(types.SpecStateFailureStates):
				r.failed++
				res.failures = append(res.failures, s)
			case s.Failure.Message == "" && isExcluded:
				r.excluded++
				res.reasons[ours.reason] = append(res.reasons[ours.reason], text)
			case isAllowed:
				r.skipped++
				res.reasons[allowed.reason] = append(res.reasons[allowed.reason], text)
			default:
				r.failed++
				res.badSkips = append(res.badSkips, s)
			}
		}
	}
	for _, r := range rows {
		res.rows = append(res.rows, *r)
	}
	slices.SortFunc(res.rows, func(a, b row) int { return strings.Compare(a.group, b.group) })
	return res
}

// groupOf is a spec's outermost text without decoration.
func groupOf(s types.SpecReport) string {
	if len(s.ContainerHierarchyTexts) == 0 {
		return "(none)"
	}
	name := strings.TrimPrefix(s.ContainerHierarchyTexts[0], "[k8s.io] ")
	name, _, _ = strings.Cut(name, " [")
	return name
}

// ok tells whether the run may count as passed.
func (r result) ok() bool {
	passed := 0
	for _, row := range r.rows {
		passed += row.passed
	}
	return passed > 0 && len(r.failures) == 0 && len(r.badSkips) == 0
}

// print writes the table, the reasons and the failures.
func (r result) print(w io.Writer) {
	fmt.Fprintf(w, "\n%-30s %7s %7s %8s %9s %8s\n", "group", "passed", "failed", "skipped", "excluded", "seconds")
	var sum row
	for _, x := range r.rows {
		fmt.Fprintf(w, "%-30s %7d %7d %8d %9d %8.1f\n", x.group, x.passed, x.failed, x.skipped, x.excluded, x.seconds)
		sum.passed, sum.failed, sum.skipped = sum.passed+x.passed, sum.failed+x.failed, sum.skipped+x.skipped
		sum.excluded, sum.seconds = sum.excluded+x.excluded, sum.seconds+x.seconds
	}
	fmt.Fprintf(w, "%-30s %7d %7d %8d %9d %8.1f\n", "all", sum.passed, sum.failed, sum.skipped, sum.excluded, sum.seconds)
	reasons := make([]string, 0, len(r.reasons))
	for reason := range r.reasons {
		reasons = append(reasons, reason)
	}
	slices.Sort(reasons)
	for _, reason := range reasons {
		fmt.Fprintf(w, "\nnot passed, because %s (%d):\n", reason, len(r.reasons[reason]))
		for _, text := range r.reasons[reason] {
			fmt.Fprintf(w, "  - %s\n", strings.TrimPrefix(text, "[k8s.io] "))
		}
	}
	for _, s := range r.badSkips {
		fmt.Fprintf(w, "\nSKIPPED WITHOUT LEAVE: %s\n  %s\n", s.FullText(), s.Failure.Message)
	}
	for _, s := range r.failures {
		fmt.Fprintf(w, "\nFAILED: %s\n  %s\n  at %s:%d\n", s.FullText(), strings.ReplaceAll(s.Failure.Message, "\n", "\n  "),
			s.Failure.Location.FileName, s.Failure.Location.LineNumber)
	}
}
