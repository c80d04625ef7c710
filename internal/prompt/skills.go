package prompt

import (
	"fmt"
	"html"
	"strings"
)

// Skill is what an agent is told of a skill before it uses it.
type Skill struct{ Name, Description, Path string }

// Bounds of what is shown of a description, in code points. Where there are many
// skills, each gets its part of the room for all of them.
const (
	skillChars    = 1024
	allSkillChars = 32 << 10
	minSkillChars = 60
)

// Skills lists the skills that an agent may use: what is needed to choose one, never
// their bodies (SKILL-10). It is empty where there are none. Names and descriptions
// are other people's text: each stays on one line, and none can close our block.
func Skills(list []Skill) string {
	if len(list) == 0 {
		return ""
	}
	var b strings.Builder
	b.WriteString("<skills>\nSkills are instructions for kinds of work. When one fits what you have to do, read its SKILL.md with `read_file` first, " +
		"in full, and then do as it says, as far as your task allows; other files of its folder can be read as well, by absolute paths, and never written. " +
		"From then on a skill may limit you to the tools that it names.\n")
	room := max(min(allSkillChars/len(list), skillChars), minSkillChars)
	for _, s := range list {
		fmt.Fprintf(&b, "- %s: %s (%s)\n", skillText(s.Name, 64), skillText(s.Description, room), skillText(s.Path, 4096))
	}
	b.WriteString("</skills>")
	return b.String()
}

// skillText makes one line of a text, cut and escaped.
func skillText(s string, max int) string {
	s = strings.Join(strings.Fields(strings.ToValidUTF8(s, "\uFFFD")), " ")
	return Defuse(html.EscapeString(cut(s, max)))
}

// SkillBody shows a skill that was asked for by name with its body, which is as much
// material as the task (SKILL-10). problem says why there is no body.
func SkillBody(s Skill, body, problem string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "<skill name=\"%s\" path=\"%s\">\n", skillText(s.Name, 64), skillText(s.Path, 4096))
	if problem != "" {
		fmt.Fprintf(&b, "The skill was asked for and cannot be read: %s. Only helper tools are left; say so in your answer.\n", Defuse(cut(problem, 500)))
	} else {
		b.WriteString(Defuse(strings.ToValidUTF8(body, "\uFFFD")) + "\n")
	}
	b.WriteString("</skill>")
	return b.String()
}
