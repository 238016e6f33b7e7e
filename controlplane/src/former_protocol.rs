//! Rejects callers of version 1 of the protocol with the versions of both sides. Without it, they would get a
//! status without a message.

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::task::{Context, Poll};

use reprise_proto::controlplane::PACKAGE;
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::{Service, http};
use tonic::server::NamedService;

/// Services of version 1.
const SERVICES: [&str; 4] = [
    "reprise.controlplane.v1.Membership",
    "reprise.controlplane.v1.Directory",
    "reprise.controlplane.v1.Placement",
    "reprise.controlplane.v1.Events",
];

/// Answers every call of one of the [`SERVICES`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct FormerProtocol<const SERVICE: usize>;

impl<const SERVICE: usize> NamedService for FormerProtocol<SERVICE> {
    const NAME: &'static str = SERVICES[SERVICE];
}

impl<const SERVICE: usize> Service<http::Request<Body>> for FormerProtocol<SERVICE> {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Ready<Result<http::Response<Body>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: http::Request<Body>) -> Self::Future {
        let text = format!(
            "the caller speaks reprise.controlplane.v1, this member speaks {PACKAGE}: use agents, tools and members of \
             the same release"
        );
        tracing::warn!(condition = "former_protocol", "rejected a call: {text}");
        ready(Ok(Status::unimplemented(text).into_http()))
    }
}
