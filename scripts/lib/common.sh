# Shared by the scripts: where the repository is, how they speak, how they remember what is done. Sourced, not run.
# Everything for people goes to standard error.

TB_ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
TB_VENV=${TENSORBUS_VENV:-$TB_ROOT/.venv}
TB_PRESET=${TENSORBUS_PRESET:-release}
TB_JOBS=${TENSORBUS_JOBS:-$(nproc)}
# What one clone compiled serves every other: paths below the clone do not count.
export CCACHE_BASEDIR=${CCACHE_BASEDIR:-$TB_ROOT} CCACHE_NOHASHDIR=true

if [ -t 2 ] && [ -z "${NO_COLOR:-}" ]; then
  TB_BOLD=$'\e[1m' TB_RED=$'\e[31m' TB_DIM=$'\e[2m' TB_OFF=$'\e[0m'
else
  TB_BOLD='' TB_RED='' TB_DIM='' TB_OFF=''
fi

say() { printf '%s==>%s %s\n' "$TB_BOLD" "$TB_OFF" "$*" >&2; }
note() { printf '%s    %s%s\n' "$TB_DIM" "$*" "$TB_OFF" >&2; }
die() { printf '%serror:%s %s\n' "$TB_RED" "$TB_OFF" "$*" >&2; exit 1; }

# step TITLE COMMAND...: runs it with its output in a log; a line with the seconds at the end, the log's end if it fails.
step() {
  local title=$1 began=$SECONDS log pid shown=0
  shift
  log=$TB_ROOT/build/logs/$(tr -c 'a-zA-Z0-9\n' '-' <<<"$title").log
  mkdir -p "$(dirname "$log")"
  say "$title"
  # Without the set-up's lock (descriptor 8): a build that outlives a killed set-up must not hold it.
  "$@" >"$log" 2>&1 </dev/null 8>&- &
  pid=$!
  trap 'kill "$pid" 2>/dev/null; exit 143' TERM INT
  while kill -0 "$pid" 2>/dev/null; do
    sleep 0.1
    # A sign of life every 20 seconds: the last line of the log, which for a build is its [done/total].
    if ((SECONDS - began - shown >= 20)); then
      shown=$((SECONDS - began))
      note "${shown} s: $(tail -n 1 "$log" | tr '\r' '\n' | tail -n 1 | cut -c1-100)"
    fi
  done
  if ! wait "$pid"; then
    tail -n 60 "$log" >&2
    trap - TERM INT
    die "$title failed after $((SECONDS - began)) s (all of it: $log)"
  fi
  trap - TERM INT
  note "done in $((SECONDS - began)) s"
}

# hash_files FILE...: one digest over their contents. hash_tree PATH...: over all files below, build output left out.
hash_files() { cat "$@" | sha256sum | cut -c1-32; }
hash_tree() {
  (cd "$TB_ROOT" && for path in "$@"; do [ ! -e "$path" ] || printf '%s\0' "$path"; done |
    xargs -0 -I{} find {} \( -name __pycache__ -o -name '*.egg-info' \) -prune -o -type f -print0 |
    sort -z | xargs -0 sha256sum | sha256sum | cut -c1-32)
}

# fresh NAME DIGEST: has NAME been done with these inputs? remember NAME DIGEST: it has now.
fresh() { [ "$(cat "$TB_VENV/.stamps/$1" 2>/dev/null)" = "$2" ]; }
remember() { mkdir -p "$TB_VENV/.stamps" && printf '%s\n' "$2" >"$TB_VENV/.stamps/$1"; }

# cmake_flags: what every configure of ours is given; one place, so that set-up and tests share a build folder.
cmake_flags() {
  printf '%s\n' "-DPython_EXECUTABLE=$TB_VENV/bin/python" -DTENSORBUS_BUILD_PYTHON=ON "-DTENSORBUS_BUILD_BENCH=$([ -e "$TB_ROOT/bench/CMakeLists.txt" ] && echo ON || echo OFF)"
  [ "${CI:-}" != true ] || printf '%s\n' -DTENSORBUS_WERROR=ON
}
