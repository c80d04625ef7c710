#!/usr/bin/env bash
# Gives every module of the workspace a require and a replace line for each local
# module that it reaches, directly or not.
#
# `go mod tidy` does not read go.work: with one indirect replace missing the
# workspace still builds, but the module alone does not, and the fault would stay
# hidden until somebody builds it alone.
#
#   scripts/mod-link.sh           writes the lines
#   scripts/mod-link.sh --check   changes nothing, exits 1 and says what is missing
set -euo pipefail

check=
case "${1-}" in
'') ;;
--check) check=1 ;;
*) echo "usage: mod-link.sh [--check]" >&2; exit 2 ;;
esac

cd "$(dirname "$0")/.."
[ -f go.work ] || { echo "mod-link: no go.work in $PWD" >&2; exit 1; }

root=$(pwd -P)
module=github.com/herdgate/herdgate

# Folders of the modules, relative to the root; a module's path is $module/FOLDER.
dirs=()
while read -r dir; do dirs+=("${dir#"$root"/}"); done < <(go list -m -f '{{.Dir}}')

# required DIR prints the folders of the local modules in DIR's require lines.
required() {
    sed -n -E "s#^(require)?[[:space:]]*$module/([^[:space:]]+) v[^[:space:]]+.*#\2#p" "$1/go.mod"
}

# reached DIR prints the folders of all local modules that DIR reaches.
reached() {
    local todo=("$1") seen=" $1 " next
    while [ ${#todo[@]} -gt 0 ]; do
        local now=${todo[0]}
        todo=("${todo[@]:1}")
        while read -r next; do
            case "$seen" in *" $next "*) continue ;; esac
            seen+="$next "
            todo+=("$next")
            echo "$next"
        done < <(required "$now")
    done
}

# relative FROM TO prints the path from one folder to the other.
relative() {
    local from=$1 to=$2 up=
    while [ "${from%%/*}" = "${to%%/*}" ]; do
        from=${from#*/}
        to=${to#*/}
    done
    while :; do
        up+=../
        case "$from" in */*) from=${from#*/} ;; *) break ;; esac
    done
    echo "$up$to"
}

# The two public modules have releases, the others are never published alone.
version() {
    case "$1" in pkg/*) echo v0.1.0 ;; *) echo v0.0.0 ;; esac
}

bad=0
for dir in "${dirs[@]}"; do
    have=$(required "$dir")
    replaced=$(cd "$dir" && go mod edit -print)
    while read -r dep; do
        [ -n "$dep" ] || continue
        want="$module/$dep => $(relative "$dir" "$dep")"
        if ! grep -qxF "$dep" <<<"$have"; then
            if [ -n "$check" ]; then
                echo "$dir/go.mod: no require of $module/$dep"; bad=1
            else
                (cd "$dir" && go mod edit -require="$module/$dep@$(version "$dep")")
            fi
        fi
        # The whole line, so that no longer path fits.
        if ! grep -qE "^(replace)?[[:space:]]*${want//./\\.}$" <<<"$replaced"; then
            if [ -n "$check" ]; then
                echo "$dir/go.mod: no replace $want"; bad=1
            else
                (cd "$dir" && go mod edit -replace="$module/$dep=$(relative "$dir" "$dep")")
            fi
        fi
    done < <(reached "$dir")
done
[ "$bad" = 0 ] || { echo "run make mod-link" >&2; exit 1; }
