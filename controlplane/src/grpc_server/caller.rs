//! The client of a connection, and the only place that authorises its calls.
//!
//! ```text
//! connection ──Caller in each request──► Authorised: role × method ──► service: the node of the request
//! ```
//!
//! [`Authorised`] wraps every service, so a method that the table does not have is refused. Services check the node
//! that a request acts for, because only they decode it. A connection is kept from its first permitted call on: one whose
//! caller may do nothing is closed in time, and for others.

use std::convert::Infallible;
use std::future::ready;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

use reprise_daemon::connections::{ConnectionLimit, Permit};
use reprise_daemon::rejected_connections::Reason;
use reprise_identity::Identity;
use reprise_identity::access::{Call, Grant, Refusal, authorise, authorise_for};
use reprise_identity::limits::Client;
use reprise_policy::NodeId;
use tonic::body::Body;
use tonic::codegen::{BoxFuture, Service, http};
use tonic::server::NamedService;
use tonic::{Request, Status};

use crate::cluster::Cluster;

/// Client of a connection; in the extensions of each of its requests.
#[derive(Clone, Debug)]
pub(crate) struct Caller {
    state: Arc<CallerState>,
}

#[derive(Debug)]
struct CallerState {
    address: Option<SocketAddr>,
    /// `None` on plain connections.
    identity: Option<Identity>,
    /// Whether a refusal of this connection has been logged and counted.
    is_refused: AtomicBool,
    /// Whether the caller has made a call that it may make.
    has_called: AtomicBool,
    permit: Permit,
}

/// A service whose calls are authorised by the caller's role.
#[derive(Clone, Debug)]
pub(crate) struct Authorised<S>(pub(crate) S);

impl Caller {
    pub(crate) fn new(address: Option<SocketAddr>, identity: Option<Identity>, permit: Permit) -> Caller {
        let (is_refused, has_called) = (AtomicBool::new(false), AtomicBool::new(false));
        Caller { state: Arc::new(CallerState { address, identity, is_refused, has_called, permit }) }
    }

    /// Limit of the listener.
    pub(super) fn limit(&self) -> &ConnectionLimit {
        self.state.permit.limit()
    }

    /// Whether the caller has made a call that it may make.
    pub(super) fn has_called(&self) -> bool {
        self.state.has_called.load(Ordering::Relaxed)
    }

    /// Subject of log lines.
    fn client(&self) -> Option<Client> {
        let identity = self.state.identity.clone().map(Client::Identity);
        identity.or_else(|| self.state.address.map(|address| Client::at(address.ip())))
    }

    pub(super) fn log_end_of_certificate(&self) {
        let client = self.client().map(tracing::field::display);
        tracing::info!(client, "closed a connection: the certificate of the client has ended");
    }

    /// Checks that the caller acts for its own node. The node of a request may not be known yet: the service then
    /// finds no registration, and changes nothing.
    pub(crate) fn authorise_node<T>(
        request: &Request<T>,
        call: Call,
        name: impl FnOnce() -> Option<String>,
    ) -> Result<(), Status> {
        let caller = request.extensions().get::<Caller>().ok_or_else(unidentified)?;
        let identity = caller.state.identity.as_ref();
        let checked = match authorise(identity, call) {
            Ok(Grant::All) => Ok(()),
            Ok(Grant::Node(_)) => name().map_or(Ok(()), |name| authorise_for(identity, call, &name)),
            Err(refusal) => Err(refusal),
        };
        checked.map_err(|refusal| caller.refuse(&refusal))
    }

    /// As [`authorise_node`](Caller::authorise_node), by the number of the node.
    pub(crate) fn authorise_number<T>(
        request: &Request<T>,
        call: Call,
        cluster: &Cluster,
        number: u32,
    ) -> Result<(), Status> {
        let number = u16::try_from(number).map(NodeId).ok();
        Caller::authorise_node(request, call, || number.and_then(|node| cluster.name_of(node)))
    }

    fn authorise_method(&self, path: &str) -> Result<(), Status> {
        if let Some(identity) = self.state.identity.as_ref() {
            let Some(call) = Call::of_grpc(path) else {
                let refusal = Refusal::Unknown(path.to_owned());
                self.refuse(&refusal);
                return Err(Status::unimplemented(refusal.to_string()));
            };
            authorise(Some(identity), call).map_err(|refusal| self.refuse(&refusal))?;
        }
        self.keep_connection()
    }

    /// Keeps the connection from being closed for others, from the first permitted call on.
    fn keep_connection(&self) -> Result<(), Status> {
        if self.has_called() {
            return Ok(());
        }
        if !self.state.permit.set_busy() {
            return Err(Status::unavailable("the connection was closed to make room for another one"));
        }
        self.state.has_called.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Logs and counts the first refusal of the connection.
    fn refuse(&self, refusal: &Refusal) -> Status {
        let state = &self.state;
        if !state.is_refused.swap(true, Ordering::Relaxed) {
            self.limit().count(Reason::Refused);
            let client = self.client().map(tracing::field::display);
            let socket = state.address.map(tracing::field::display);
            tracing::warn!(condition = "call_refused", client, socket, %refusal, "refused a call");
        }
        Status::permission_denied(refusal.to_string())
    }
}

/// A request that did not come through [`Authorised`].
fn unidentified() -> Status {
    Status::internal("the connection has no caller: this is a bug, please report it")
}

impl<S: NamedService> NamedService for Authorised<S> {
    const NAME: &'static str = S::NAME;
}

impl<S> Service<http::Request<Body>> for Authorised<S>
where
    S: Service<
            http::Request<Body>,
            Response = http::Response<Body>,
            Error = Infallible,
            Future = BoxFuture<http::Response<Body>, Infallible>,
        >,
{
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = S::Future;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.0.poll_ready(context)
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let caller = request.extensions().get::<Caller>();
        let checked = caller
            .map_or_else(|| Err(unidentified()), |caller| caller.authorise_method(request.uri().path()));
        match checked {
            Ok(()) => self.0.call(request),
            Err(status) => Box::pin(ready(Ok(status.into_http()))),
        }
    }
}

#[cfg(test)]
mod tests {
    use reprise_daemon::rejected_connections::{Listener, RejectedConnections};
    use reprise_identity::Role;
    use tonic::Code;

    use super::*;

    fn caller(role: Option<Role>) -> (Caller, RejectedConnections) {
        let rejected = RejectedConnections::default();
        let identity = role.map(|role| Identity::new("test", role).expect("a valid name"));
        let limit = ConnectionLimit::new(Listener::Grpc, 1, rejected.clone());
        let permit = limit.admit().expect("there is room");
        (Caller::new(None, identity, permit), rejected)
    }

    fn node_1() -> Option<Role> {
        Some(Role::Agent("node-1".to_owned()))
    }

    #[test]
    fn refuses_by_role_and_counts_a_connection_once() {
        let (caller, rejected) = caller(node_1());
        let path = |method: &str| format!("/reprise.controlplane.v2.{method}");
        caller.authorise_method(&path("Membership/Register")).expect("agents register");
        for method in ["Placement/SetTenant", "Placement/RemoveTenant", "Membership/ForgetNode"] {
            let refused = caller.authorise_method(&path(method)).expect_err(method);
            assert_eq!(refused.code(), Code::PermissionDenied);
            assert!(refused.message().contains("certificate of operator or admin"), "{refused}");
        }
        let unknown = caller.authorise_method(&path("Membership/Later")).expect_err("not in the table");
        assert_eq!(unknown.code(), Code::Unimplemented);
        assert_eq!(rejected.get(Listener::Grpc, Reason::Refused), 1);
    }

    #[test]
    fn connection_is_kept_from_the_first_permitted_call_on() {
        let rejected = RejectedConnections::default();
        let limit = ConnectionLimit::new(Listener::Grpc, 1, rejected.clone());
        let identity = |role: Role| Some(Identity::new("test", role).expect("a valid name"));
        let path = "/reprise.controlplane.v2.Membership/Register";
        let console = Caller::new(None, identity(Role::Console), limit.admit().expect("there is room"));
        console.authorise_method(path).expect_err("consoles do not register");
        assert!(!console.has_called());
        // The refused call keeps no connection: another one replaces it.
        let permit = limit.admit().expect("there is room");
        let agent = Caller::new(None, identity(Role::Agent("node-1".to_owned())), permit);
        agent.authorise_method(path).expect("agents register");
        assert!(agent.has_called());
        assert!(limit.admit().is_none(), "its connection is kept");
        let path = "/reprise.controlplane.v2.Directory/Lookup";
        let closed = console.authorise_method(path).expect_err("its connection was closed");
        assert_eq!(closed.code(), Code::Unavailable);
        assert_eq!(rejected.get(Listener::Grpc, Reason::Full), 1);
    }

    #[test]
    fn acts_for_its_own_node_and_for_unknown_ones() {
        let asked = |role: Option<Role>, name: Option<&str>| {
            let mut request = Request::new(());
            request.extensions_mut().insert(caller(role).0);
            Caller::authorise_node(&request, Call::Update, || name.map(str::to_owned))
        };
        asked(node_1(), Some("node-1")).expect("its own node");
        asked(node_1(), None).expect("the update finds no registration");
        asked(None, Some("node-2")).expect("a plain connection");
        let refused = asked(node_1(), Some("node-2")).expect_err("another node");
        assert_eq!(refused.code(), Code::PermissionDenied);
        let refused = asked(Some(Role::Admin), Some("node-2")).expect_err("no agent");
        assert!(refused.message().contains("agent/NODE"), "{refused}");
    }

    #[test]
    fn refuses_requests_without_a_caller() {
        let refused =
            Caller::authorise_node(&Request::new(()), Call::Update, || None).expect_err("no caller");
        assert_eq!(refused.code(), Code::Internal);
    }
}
