package subagent

import "strings"

// Fact is one thing that a lead is told about delegating. There is one table of them,
// from which the lead's prompt, the description of its tool and those of the built-in
// types are made, so that they cannot drift apart (ROUTE-14).
type Fact struct {
	Rule string
	Text string
	// Parallel facts are left out where only one task can run at a time (ROUTE-08).
	Parallel bool
	// Brief facts stand in the tool's description as well.
	Brief bool
}

// worth says when a built-in type is worth what it costs, to a lead that may make
// concurrent task calls in one answer; it is empty for other types.
func worth(name string, concurrent int) string {
	switch {
	case name == GeneralPurpose && concurrent == 1: // ROUTE-08
		return "Worth its cost when the reading would fill your own context."
	case name == GeneralPurpose: // ROUTE-02
		return "Worth its cost when such tasks can run side by side, or when the reading would fill your own context."
	case name == Bash: // ROUTE-11
		return "For long or noisy command work; a single routine command is quicker run directly."
	}
	return ""
}

// DescriptionFor is the description as a lead reads it that may make concurrent task
// calls in one answer.
func (d Definition) DescriptionFor(concurrent int) string {
	if d.Origin != OriginBuiltin {
		return d.Description
	}
	return strings.TrimSuffix(d.Description, worth(d.Name, 0)) + worth(d.Name, concurrent)
}

// Routing returns what a lead is told that may make concurrent task calls in one
// answer. Citation shows how receipts are cited; empty while there are none.
func Routing(concurrent int, citation string) []Fact {
	facts := []Fact{
		{Rule: "ROUTE-01", Brief: true, Text: "Do the work yourself by default, and when in doubt. That a job is complex, long, has many steps or a large repository is never reason enough to delegate."},
	}
	if concurrent == 1 {
		facts = append(facts,
			Fact{Rule: "ROUTE-08", Brief: true, Text: "Delegate only where a sub-agent's special tools, model or instructions, or keeping a bounded but context-heavy job out of this conversation, is a material benefit."},
			Fact{Rule: "ROUTE-02", Text: "Weigh it against what it costs: the start, finding out again what you know already, taking the result over, conflicts over state, side effects."})
	} else {
		facts = append(facts,
			Fact{Rule: "ROUTE-02", Brief: true, Text: "Delegate only if the benefit clearly exceeds the cost. Benefits: independent parts done side by side, a specialist's tools, model or instructions, keeping a bounded but context-heavy job out of this conversation. Costs: the start, finding out again what is known already, putting the results together, conflicts over state, side effects."},
			Fact{Rule: "ROUTE-03", Parallel: true, Brief: true, Text: "Never let tasks run side by side if one needs what another finds, or if they change the same files, shared state or anything outside."},
			Fact{Rule: "ROUTE-06", Parallel: true, Brief: true, Text: "Scopes that run side by side must neither overlap nor depend on each other. Use as few sub-agents as will do."})
	}
	facts = append(facts,
		Fact{Rule: "ROUTE-04", Text: "That something would be looked up twice, or that there is a cheap direct way, is a cost to weigh and forbids nothing."},
		Fact{Rule: "ROUTE-05", Text: "A bounded chain of steps that build on each other may go to one sub-agent as a whole, if its special skills or the isolation clearly pay."})
	if concurrent > 1 {
		facts = append(facts, Fact{Rule: "ROUTE-07", Parallel: true, Text: "Judge every further batch afresh; within a batch, the time saved by running side by side counts."})
	}
	return append(facts,
		Fact{Rule: "ROUTE-13", Brief: true, Text: reports(citation)},
		Fact{Rule: "ROUTE-10", Text: "Ask the user before you delegate, if anything must be asked: a sub-agent cannot."},
		Fact{Rule: "ROUTE-11", Text: "Everyday git, build, test or deploy commands are not reason enough for a shell sub-agent."})
}

// reports says what to expect of a report, and to look for oneself (ROUTE-13).
func reports(citation string) string {
	const look = "Look up some of the handles that a report gives (paths, addresses, ids) before you build on it."
	if citation == "" {
		return look
	}
	return "Expect reports to cite receipts, as in " + citation + ": a receipt shows that a call was made, never that a claim is right. " + look
}
