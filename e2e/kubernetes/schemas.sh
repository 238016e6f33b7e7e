#!/usr/bin/env bash
# Extracts Kubernetes' own schemas (OpenAPI) of several versions from its published Go modules into the cache
# folder. Prints the path of each on its own line, oldest first. The modules are checked against the sums
# below.
set -euo pipefail
cd "$(dirname "$0")"
cache=${REPRISE_CACHE:-$HOME/.cache/reprise}
versions=(
    "v1.34.4 h1:Yy6R4QB8C9kJPp25GFqEvX5XQwY5qzKeqD0Xx6oAcmk="
    "v1.35.4 h1:o/8dBC/pHVpYoGV4OAIytAlNPZbdYVTXJHoYvXC4qzM="
    "v1.36.3 h1:qDQdoMiluAE2Eab6Fa52YV+WjiGz9mZFFoagEA6cI+o="
    "v1.37.1 h1:LTUzSbp9n0W7649oVKBYfC48zcoD3vCk++1PZQn28q8="
)
mkdir -p "$cache/schemas"
exec {lock}> "$cache/schemas/lock"
flock "$lock"
for one in "${versions[@]}"; do
    version=${one% *} sum=${one#* }
    schema=$cache/schemas/kubernetes-$version.json
    if [ ! -f "$schema" ]; then
        what="a schema of Kubernetes"
        . ../go.sh
        # Outside of any module, so that no go.mod can select another version.
        module=$(cd / && go mod download -json "k8s.io/kubernetes@$version")
        found=$(sed -n 's/^\t"Sum": "\(.*\)",$/\1/p' <<< "$module")
        [ "$found" = "$sum" ] || { echo "k8s.io/kubernetes@$version has the sum '$found', not $sum: $module" >&2; exit 1; }
        folder=$(sed -n 's/^\t"Dir": "\(.*\)",$/\1/p' <<< "$module")
        cp "$folder/api/openapi-spec/swagger.json" "$schema.new"
        chmod u+w "$schema.new"
        mv "$schema.new" "$schema"
    fi
    echo "$schema"
done
