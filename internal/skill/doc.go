// Package skill knows skills: folders with a file SKILL.md, whose header says when
// to use them and which tools they need, and whose body says how the work is done.
//
// Three states are kept apart. A skill is enabled unless its header says otherwise.
// It is disclosed to an agent if it is enabled and on the agent's list: its name,
// description and path are in the prompt, and its folder can be read. It is active
// once somebody begins the task with /NAME, or the agent has read its SKILL.md.
// Only active skills restrict tools, and only disclosed ones can become active.
//
// Parsing, merging and the state of activation are pure; [Loader] reads folders,
// and [Session] puts it all around one conversation.
package skill
