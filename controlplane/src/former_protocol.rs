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

/// Answers every call of the membership service of version 1, which agents and tools call first.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FormerProtocol;

impl NamedService for FormerProtocol {
    const NAME: &'static str = "reprise.controlplane.v1.Membership";
}

impl Service<http::Request<Body>> for FormerProtocol {
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
        ready(Ok(Status::unimplemented(text).into_http()))
    }
}
