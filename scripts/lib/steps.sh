# The steps of scripts/setup. Sourced after common.sh. Each looks first whether there is anything to do.

# ensure_packages LIST...: installs those of the lists that are missing.
ensure_packages() {
  local wanted missing=() package
  wanted=$(sed 's/#.*//' "$@" | tr -s ' \n' '\n' | sed '/^$/d')
  if ! command -v dpkg-query >/dev/null; then
    note "not a Debian system: install what $* name with your own package manager"
    return
  fi
  local installed
  installed=$(dpkg-query -W -f '${db:Status-Abbrev}${Package}\n' $wanted 2>/dev/null | sed -n 's/^ii //p' || true)
  for package in $wanted; do
    grep -qxF -- "$package" <<<"$installed" || missing+=("$package")
  done
  [ ${#missing[@]} -gt 0 ] || return 0
  [ "$(id -u)" = 0 ] || die "missing Debian packages; as root: apt-get install --no-install-recommends ${missing[*]}"
  step "Debian packages: ${#missing[@]} to install" install_packages "${missing[@]}"
}

install_packages() {
  local attempt
  export DEBIAN_FRONTEND=noninteractive
  # The lock of the package lists has no wait of its own, and a mirror may fail once: try again for some minutes.
  for attempt in 1 2 3 4 5 6 7 8 9 10; do
    apt-get update && break
    [ "$attempt" -lt 10 ] || return 1
    sleep $((attempt * 3))
  done
  for attempt in 1 2 3; do
    apt-get install -y --no-install-recommends -o DPkg::Lock::Timeout=300 "$@" && return 0
    sleep 5
  done
  return 1
}

# The python that makes the environment: 3.11 or newer.
base_python() {
  local name
  for name in "${TENSORBUS_PYTHON:-python3}" python3.11 python3.12 python3.13; do
    if command -v "$name" >/dev/null && "$name" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$name"
      return
    fi
  done
  return 1
}

ensure_venv() {
  local digest python
  digest=$(hash_files "$TB_ROOT/requirements.txt" "$TB_ROOT/requirements-dev.txt")
  if fresh requirements "$digest" && [ -x "$TB_VENV/bin/python" ]; then return; fi
  python=$(base_python) || die "Python 3.11 or newer with venv is needed (Debian: apt-get install python3-venv python3-dev)"
  if ! "$TB_VENV/bin/python" -c '' 2>/dev/null; then
    step "virtual environment in ${TB_VENV#"$TB_ROOT"/}" "$python" -m venv --clear "$TB_VENV"
  fi
  step "Python packages (PyTorch, CPU build, among them)" install_requirements
  remember requirements "$digest"
}

install_requirements() {
  local attempt
  for attempt in 1 2 3; do
    "$TB_VENV/bin/python" -m pip install --disable-pip-version-check --no-input --progress-bar off \
      -r "$TB_ROOT/requirements.txt" -r "$TB_ROOT/requirements-dev.txt" && return 0
    sleep 5
  done
  return 1
}

# What the programs and the Python package are made of; a change in any of it means a new build.
SOURCES=(CMakeLists.txt CMakePresets.json cmake proto tensorbus planner agent worker_shim training_core rollout_adapter
  rl_loop python bench share pyproject.toml requirements.txt)

ensure_build() {
  local digest
  digest=$(hash_tree "${SOURCES[@]}")-$TB_PRESET
  # Continuous integration wants a build in which a warning is an error (cmake_flags); anybody takes that one, too.
  if fresh build "$digest" && [ -x "$TB_VENV/bin/tensorbusctl" ] && { [ "${CI:-}" != true ] || fresh strict-build "$digest"; }; then
    return
  fi
  rm -f "$TB_VENV/.stamps/build" "$TB_VENV/.stamps/strict-build"
  step "configure (preset $TB_PRESET)" configure
  step "build (first time: some minutes)" cmake --build "$TB_ROOT/build/$TB_PRESET" -j "$TB_JOBS" --target programs
  step "install into ${TB_VENV#"$TB_ROOT"/}" install_into_venv
  [ "${CI:-}" != true ] || remember strict-build "$digest"
  remember build "$digest"
  note "the programs are in ${TB_VENV#"$TB_ROOT"/}/bin; \`. $TB_VENV/bin/activate\` puts them on PATH"
}

configure() {
  local flags
  mapfile -t flags < <(cmake_flags)
  cd "$TB_ROOT" && cmake --preset "$TB_PRESET" "${flags[@]}"
}

# Links into the build folder, so that what is installed is never older than what is built: the programs one by one, the
# Python package by a .pth line (there it lies as the compiled module beside links to its sources).
install_into_venv() {
  local program site
  for program in "$TB_ROOT/build/$TB_PRESET"/bin/tensorbus*; do
    [ ! -x "$program" ] || ln -sfn "$program" "$TB_VENV/bin/$(basename "$program")"
  done
  site=$("$TB_VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  printf '%s\n' "$TB_ROOT/build/$TB_PRESET/python" >"$site/tensorbus-build.pth"
  # From a folder without a `tensorbus` of its own: the sources' folder of that name must not stand in for the package.
  (cd "$TB_VENV" && "$TB_VENV/bin/python" -c 'import tensorbus; tensorbus.__version__')
}
