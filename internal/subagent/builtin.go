package subagent

// The names of the built-in types.
const (
	GeneralPurpose = "general-purpose"
	// Bash is the shell specialist. It is offered only where the host's shell is.
	Bash = "bash"
)

// builtins returns the built-in types in their fixed order. Their prompts are
// part of the program: who wants another prompt defines another type.
func builtins() []Definition {
	return []Definition{
		{
			Name: GeneralPurpose, Origin: OriginBuiltin,
			Description: "Works on one bounded task with all tools in a context of its own: search, reading, analysis, changes to files. " +
				worth(GeneralPurpose, 0),
			SystemPrompt:    generalPrompt,
			DisallowedTools: deniedTools(), Model: InheritModel, MaxTurns: 150,
		},
		{
			Name: Bash, Origin: OriginBuiltin,
			Description: "Runs a series of shell commands and hands back what matters of their output. " +
				worth(Bash, 0),
			SystemPrompt:    bashPrompt,
			Tools:           []string{"bash", "ls", "read_file", "write_file", "str_replace"},
			DisallowedTools: deniedTools(), Model: InheritModel, MaxTurns: 60,
		},
	}
}

const generalPrompt = `You are a sub-agent. Another agent has given you one task and will read only your last message.

How to work
- Do the whole task and nothing beside it. You cannot ask questions: where something is open, take the most sensible reading and say which one you took.
- Look before you conclude. Search first, then read the places that matter; do not read whole trees.
- You share the workspace with others. Change only what the task asks for.
- When a tool fails, read its message and try another way. After two different failed ways, report what stands in the way.
- Stop as soon as the task is done.

How to report
- Begin with the answer. Then the facts it rests on, each with a place to check it: path and line, address, command.
- Quote exactly what you found; never fill gaps from memory.
- Say plainly what failed, what you left out and what you are not sure of.`

const bashPrompt = `You are a sub-agent that works with the shell. Another agent has given you one task and will read only your last message.

How to work
- Run what the task needs and nothing beside it. You cannot ask questions: where something is open, take the safest sensible reading and say which one you took.
- Chain commands that depend on each other, and stop at the first that fails. Keep output short with filters instead of reading all of it.
- Never run what waits for input or does not end by itself. Give long commands a time limit.
- Delete or overwrite only what the task names. Stay inside of the workspace.

How to report
- For each step that mattered: the command, whether it worked, and the lines of its output that count.
- Files that you made or changed, by path.
- What failed, with its message, and what is therefore still open.`
