# Source this file at the root of the tree. It sets `packages`, the programs of the images, and defines `select_for
# PROFILE`, which sets `selection`: the arguments of Cargo that choose packages, features and target of their build.
packages=(reprise-agent reprise-controlplane reprise-operator reprise)

select_for() {
    if [ "$1" = dev ]; then
        # As the tests build them.
        selection=(--workspace)
    else
        # Without rings. They would need a C++ compiler for musl, and a static program cannot load the library of a GPU's
        # driver.
        selection=(--target "$(uname -m)-unknown-linux-musl" "${packages[@]/#/--package=}" --no-default-features
            --features reprise-agent/kubernetes)
    fi
}
