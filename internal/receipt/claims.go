package receipt

import (
	"regexp"
	"strings"
	"unicode"
	"unicode/utf8"
)

// longReport is the length, in code points, from which a report without any
// citation is flagged if there were receipts to cite.
const longReport = 240

var englishVerbs = set(`added built changed cleaned committed compiled configured created deleted deployed downloaded
	edited executed exported fetched fixed generated implemented installed merged modified moved patched produced ran
	refactored removed renamed replaced saved tested updated uploaded verified written wrote`)

var chineseVerbs = strings.Fields(`创建 生成 写入 保存 修改 更新 删除 运行 执行 安装 部署 上传 下载 修复 添加 新增
	编写 编译 构建 导出 测试 提交 移动 重命名 配置 替换 清理`)

var (
	pathRule = regexp.MustCompile(`(?:/[` + word + `.\-]+){2}`)
	fileRule = regexp.MustCompile(`[` + word + `.\-]+\.(?i:py|md|txt|json|yaml|yml|csv|html|js|ts|sh|log|pdf|png|jpg|jpeg)(?:[^` + word + `]|$)`)
)

func set(words string) map[string]bool {
	m := map[string]bool{}
	for _, w := range strings.Fields(words) {
		m[w] = true
	}
	return m
}

// claims reports whether a report without citations seems to tell of actions
// (RECEIPT-11). In doubt it does.
func claims(report string, receipts bool) bool {
	if receipts && utf8.RuneCountInString(strings.TrimSpace(report)) >= longReport {
		return true
	}
	if pathRule.MatchString(report) || fileRule.MatchString(report) {
		return true
	}
	for _, verb := range chineseVerbs {
		if strings.Contains(report, verb) {
			return true
		}
	}
	// Words end where letters and digits of any script do.
	words := strings.FieldsFunc(strings.ToLower(report), func(r rune) bool { return !unicode.IsLetter(r) && !unicode.IsDigit(r) && r != '_' })
	for _, w := range words {
		if englishVerbs[w] {
			return true
		}
	}
	return false
}
