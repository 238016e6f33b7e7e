# All images of Reprise, for a container engine; `make images` builds the same images without one. Each
# target is an image:
#
#   for image in reprise-agent reprise-controlplane reprise-operator reprise-etcd reprise; do
#       docker build --target $image --tag $image:0.1.0 .
#   done
#
# Each image is one static program on an empty base: no shell, no packages, no users. With the profile `dev`
# it also contains the C library. Programs run as user 65532 and do not write to their own file system.

ARG VERSION=0.1.0
# Profile of Cargo.toml: images, or dev, which includes the system's C library (images/programs.sh).
ARG PROFILE=images

FROM docker.io/library/rust:1.95-bookworm AS programs
# Musl, because a static glibc cannot resolve host names. The C code of dependencies is compiled for musl,
# too.
RUN apt-get update && apt-get install -y --no-install-recommends musl-tools && \
    rustup target add "$(uname -m)-unknown-linux-musl"
WORKDIR /source
COPY . .
ARG PROFILE
RUN images/programs.sh /programs "$PROFILE"

FROM docker.io/library/golang:1.26-bookworm AS etcd
WORKDIR /source
COPY e2e/go.sh e2e/go.sh
COPY e2e/etcd e2e/etcd
COPY images/etcd.sh images/etcd.sh
RUN mkdir /programs && cp "$(REPRISE_CACHE=/cache images/etcd.sh)" /programs/reprise-etcd

FROM scratch AS reprise-agent
ARG VERSION
ARG PROFILE
LABEL org.opencontainers.image.title="reprise-agent" \
      org.opencontainers.image.description="Node agent of Reprise, a cluster-wide KV cache for LLM inference engines" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.licenses="Apache-2.0" \
      dev.reprise.profile="$PROFILE"
COPY --from=programs /programs/libraries/ /
COPY --from=programs /programs/reprise-agent /reprise-agent
USER 65532:65532
ENTRYPOINT ["/reprise-agent"]

FROM scratch AS reprise-controlplane
ARG VERSION
ARG PROFILE
LABEL org.opencontainers.image.title="reprise-controlplane" \
      org.opencontainers.image.description="Control plane of Reprise, a cluster-wide KV cache for LLM inference engines" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.licenses="Apache-2.0" \
      dev.reprise.profile="$PROFILE"
COPY --from=programs /programs/libraries/ /
COPY --from=programs /programs/reprise-controlplane /reprise-controlplane
USER 65532:65532
ENTRYPOINT ["/reprise-controlplane"]

FROM scratch AS reprise-operator
ARG VERSION
ARG PROFILE
LABEL org.opencontainers.image.title="reprise-operator" \
      org.opencontainers.image.description="Kubernetes operator of Reprise, a cluster-wide KV cache for LLM inference engines" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.licenses="Apache-2.0" \
      dev.reprise.profile="$PROFILE"
COPY --from=programs /programs/libraries/ /
COPY --from=programs /programs/reprise-operator /reprise-operator
USER 65532:65532
ENTRYPOINT ["/reprise-operator"]

FROM scratch AS reprise
ARG VERSION
ARG PROFILE
LABEL org.opencontainers.image.title="reprise" \
      org.opencontainers.image.description="Command line of Reprise, a cluster-wide KV cache for LLM inference engines" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.licenses="Apache-2.0" \
      dev.reprise.profile="$PROFILE"
COPY --from=programs /programs/libraries/ /
COPY --from=programs /programs/reprise /reprise
USER 65532:65532
ENTRYPOINT ["/reprise"]

# The etcd version of the tests, for clusters with etcd mode Managed.
FROM scratch AS reprise-etcd
ARG VERSION
LABEL org.opencontainers.image.title="reprise-etcd" \
      org.opencontainers.image.description="etcd, built from its published Go module" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=etcd /programs/reprise-etcd /reprise-etcd
USER 65532:65532
ENTRYPOINT ["/reprise-etcd"]
