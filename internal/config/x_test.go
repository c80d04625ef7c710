package config
import ("testing";"fmt";"strings";"time")
func TestSlow(t *testing.T){
 var b strings.Builder
 for i:=0;b.Len()<MaxFileBytes-20;i++ { fmt.Fprintf(&b,"a%d:\n",i) }
 var c strings.Builder
 c.WriteString("subagents:\n  custom_agents:\n")
 for i:=0;c.Len()<MaxFileBytes-50;i++ { fmt.Fprintf(&c,"    a%d: {tools: [x]}\n",i) }
 for n,s:=range map[string]string{"keys":b.String(),"agents":c.String(),"list":"models: ["+strings.Repeat("1,",500000)+"]","q":"lead: {model: "+strings.Repeat("?",1000000)+"}","amp":strings.Repeat("- ",500000), "dash":strings.Repeat("-\n",500000),"c":strings.Repeat("#\n",500000),"quote":"a: \""+strings.Repeat("\\n",500000)+"\"", "brace":"lead: "+strings.Repeat("{",100)+strings.Repeat("}",100), "maps": strings.Repeat("{a: ",120)+strings.Repeat("x",10), "colon":strings.Repeat("a: ",300000), "indent": func() string{var b strings.Builder; for i:=0;i<1400;i++{b.WriteString(strings.Repeat(" ",i)+"a:\n")};return b.String()}(), "star": "a: ["+strings.Repeat("*a,",300000)+"]", "qm": strings.Repeat("? ",300000), "lit":"a: |\n"+strings.Repeat("  x\n",250000), "anch":strings.Repeat("&a ",300000)} {
  st:=time.Now(); _,f:=Check("h",[]byte(s),nil); 
  t.Log(n,time.Since(st),len(f),f[:min(1,len(f))])
 }
}
