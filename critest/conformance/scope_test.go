package main

import (
	"strings"
	"testing"

	"github.com/onsi/ginkgo/v2/types"
)

// spec is a finished spec of a report.
func spec(state types.SpecState, message string, texts ...string) types.SpecReport {
	return types.SpecReport{
		LeafNodeType: types.NodeTypeIt, State: state,
		ContainerHierarchyTexts: texts[:len(texts)-1], LeafNodeText: texts[len(texts)-1],
		Failure: types.Failure{Message: message},
	}
}

func TestJudgeCountsByGroup(t *testing.T) {
	res := judge([]types.Report{{SpecReports: types.SpecReports{
		spec(types.SpecStatePassed, "", "[k8s.io] Container", "works"),
		spec(types.SpecStatePassed, "", "[k8s.io] Multiple Containers [Conformance]", "works"),
		spec(types.SpecStateSkipped, "", "[k8s.io] Speed", "benchmark of pods"),
		spec(types.SpecStateSkipped, "no AppArmor", "[k8s.io] AppArmor", "works"),
	}}}, false)
	if !res.ok() || len(res.rows) != 4 {
		t.Fatalf("ok %v, rows %+v; want a passed run of four groups", res.ok(), res.rows)
	}
	var out strings.Builder
	res.print(&out)
	for _, want := range []string{"Multiple Containers ", "benchmarks are no conformance (1)", "no AppArmor (1)"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("the table lacks %q:\n%s", want, out.String())
		}
	}
}

func TestJudgeRefusesFailuresAndStrangeSkips(t *testing.T) {
	passed := spec(types.SpecStatePassed, "", "[k8s.io] Container", "works")
	suiteSetup := spec(types.SpecStateFailed, "no socket", "x")
	suiteSetup.LeafNodeType = types.NodeTypeSynchronizedBeforeSuite
	for name, bad := range map[string]types.SpecReport{
		"failure":                     spec(types.SpecStateFailed, "wrong", "[k8s.io] Container", "breaks"),
		"panic":                       spec(types.SpecStatePanicked, "wrong", "[k8s.io] Container", "breaks"),
		"skips itself":                spec(types.SpecStateSkipped, "not implemented", "[k8s.io] Container", "hides"),
		"never ran":                   spec(types.SpecStateSkipped, "", "[k8s.io] Container", "left out"),
		"excluded, but ran and broke": spec(types.SpecStateFailed, "wrong", "[k8s.io] Speed", "benchmark breaks"),
		"suite setup":                 suiteSetup,
	} {
		res := judge([]types.Report{{SpecReports: types.SpecReports{passed, bad}}}, false)
		if res.ok() {
			t.Errorf("%s: the run counts as passed", name)
		}
	}
	if judge([]types.Report{{SpecReports: types.SpecReports{}}}, false).ok() {
		t.Error("a run of nothing counts as passed")
	}
}

func TestFocusLeavesTheRestOut(t *testing.T) {
	res := judge([]types.Report{{SpecReports: types.SpecReports{
		spec(types.SpecStatePassed, "", "[k8s.io] Container", "works"),
		spec(types.SpecStateSkipped, "", "[k8s.io] Networking", "left out by focus"),
	}}}, true)
	if !res.ok() || len(res.rows) != 1 {
		t.Errorf("ok %v, rows %+v; want one group", res.ok(), res.rows)
	}
}
