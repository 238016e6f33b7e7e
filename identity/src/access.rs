//! What an identity may do: the one table of roles and calls.
//!
//! [`decide`] is the table, and its default is to refuse. All listeners ask it: members for their gRPC methods, agents
//! for peer requests, and the admin ports for their pages. `docs/SECURITY.md` shows it; a test compares both.
//!
//! A plain connection has no identity. It exists on loopback addresses only, by an explicit setting, and may do all.

#[cfg(test)]
mod tests;

use crate::name::{Identity, Role};

/// A call, request or page that processes offer to each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Call {
    /// gRPC: registers a node.
    Register,
    /// gRPC: reports that a node is alive.
    Heartbeat,
    /// gRPC: asks which hash slots need the inventory of a node.
    Slots,
    /// gRPC: announces and withdraws replicas of a node, or its inventory.
    Update,
    /// gRPC: reports usage and drains of a node, and returns its mode, its grants and its moves.
    Report,
    /// gRPC: asks where to copy blocks of a node.
    Place,
    /// gRPC: looks up replicas of keys.
    Lookup,
    /// gRPC: asks which nodes suit a prompt.
    Route,
    /// gRPC: lists the nodes once.
    ListNodes,
    /// gRPC: follows changes of the nodes.
    WatchNodes,
    /// gRPC: lists the members once.
    ListMembers,
    /// gRPC: follows changes of the members.
    WatchMembers,
    /// gRPC: reads the sizes of the directory.
    Describe,
    /// gRPC: follows changes of the directory.
    FollowEvents,
    /// gRPC: lists the budgets of tenants.
    ListTenants,
    /// gRPC: lists the bytes that tenants use.
    ListHoldings,
    /// gRPC: sets the mode of a node: cordon, drain, uncordon.
    SetNode,
    /// gRPC: removes a node permanently.
    ForgetNode,
    /// gRPC: sets the budget of a tenant.
    SetTenant,
    /// gRPC: removes the budget of a tenant.
    RemoveTenant,
    /// Peers: loads blocks of a tenant from an agent.
    FetchBlocks,
    /// Peers: offers copies of blocks of a tenant to an agent.
    OfferBlocks,
    /// Events of KV blocks over ZeroMQ, and their replay.
    SubscribeEvents,
    /// Admin port: health, readiness and start probes.
    Health,
    /// Admin port: metrics.
    Metrics,
    /// Admin port: state of the process: `/status`, `/slack`, `/nodes`, `/directory`.
    Status,
    /// Admin port: state of a block.
    ReadBlock,
    /// Admin port: records the requests of engines.
    Trace,
}

/// Answer of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// For all nodes and tenants.
    Allowed,
    /// For the node that the certificate names: its registration, its blocks, its tenants, its own admin port.
    ItselfOnly,
    /// Not at all.
    Refused,
}

/// Extent of an authorised call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grant<'a> {
    /// For all nodes and tenants.
    All,
    /// For this node only.
    Node(&'a str),
}

/// Reason why a call is refused, with the remedy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The role may not make the call.
    #[error("{caller} may not {}: use a certificate of {}", call.action(), roles_of(*call))]
    Role {
        /// Identity of the caller.
        caller: Identity,
        /// The call.
        call: Call,
    },
    /// The call is for another node than that of the certificate.
    #[error("{caller} may not {} for node {node:?}: use the certificate of agent/{node}", call.action())]
    Node {
        /// Identity of the caller.
        caller: Identity,
        /// The call.
        call: Call,
        /// Node of the call.
        node: String,
    },
    /// No row of the table has this name.
    #[error("{0:?} is not in the table of calls: use programs of the same release")]
    Unknown(String),
}

/// Looks into the table; calls outside of it are refused.
pub fn decide(role: &Role, call: Call) -> Decision {
    use Call as C;
    use Decision::{Allowed, ItselfOnly, Refused};
    match (call, role) {
        // Only etcd itself reads its certificates.
        (_, Role::Etcd) => Refused,
        (C::Register | C::Heartbeat | C::Slots | C::Update | C::Report | C::Place, Role::Agent(_)) => {
            ItselfOnly
        }
        (C::Lookup, Role::Agent(_) | Role::Member | Role::Admin | Role::Console) => Allowed,
        (C::ListNodes | C::WatchNodes | C::ListMembers | C::WatchMembers, _) => Allowed,
        (C::Describe, Role::Member | Role::Operator | Role::Admin | Role::Console) => Allowed,
        (C::Route | C::FollowEvents | C::SubscribeEvents, Role::Admin | Role::Console) => Allowed,
        (C::ListTenants | C::ListHoldings, Role::Operator | Role::Admin | Role::Console) => Allowed,
        (C::SetNode | C::ForgetNode | C::SetTenant | C::RemoveTenant, Role::Operator | Role::Admin) => {
            Allowed
        }
        (C::FetchBlocks | C::OfferBlocks, Role::Agent(_)) => ItselfOnly,
        (C::Health, _) => Allowed,
        (C::Metrics | C::Status, Role::Agent(_)) => ItselfOnly,
        (C::Metrics | C::Status, Role::Member | Role::Operator | Role::Admin | Role::Console) => Allowed,
        (C::ReadBlock, Role::Admin | Role::Console) => Allowed,
        (C::Trace, Role::Admin) => Allowed,
        _ => Refused,
    }
}

/// Asks the table for a caller. `None` is a plain connection, where all is allowed.
///
/// # Errors
/// The role of the caller may not make the call.
pub fn authorise(caller: Option<&Identity>, call: Call) -> Result<Grant<'_>, Refusal> {
    let Some(caller) = caller else { return Ok(Grant::All) };
    match (decide(&caller.role, call), &caller.role) {
        (Decision::Allowed, _) => Ok(Grant::All),
        (Decision::ItselfOnly, Role::Agent(node)) => Ok(Grant::Node(node)),
        (Decision::ItselfOnly | Decision::Refused, _) => Err(Refusal::Role { caller: caller.clone(), call }),
    }
}

/// Asks the table for a caller that acts for a node.
///
/// # Errors
/// The caller may not make the call, or not for this node.
pub fn authorise_for(caller: Option<&Identity>, call: Call, node: &str) -> Result<(), Refusal> {
    match (authorise(caller, call)?, caller) {
        (Grant::Node(own), Some(caller)) if own != node => {
            Err(Refusal::Node { caller: caller.clone(), call, node: node.to_owned() })
        }
        _ => Ok(()),
    }
}

impl Call {
    /// Every call, in the order of the table in the documents.
    pub const ALL: [Call; 28] = [
        Call::Register,
        Call::Heartbeat,
        Call::Slots,
        Call::Update,
        Call::Report,
        Call::Place,
        Call::Lookup,
        Call::Route,
        Call::ListNodes,
        Call::WatchNodes,
        Call::ListMembers,
        Call::WatchMembers,
        Call::Describe,
        Call::FollowEvents,
        Call::ListTenants,
        Call::ListHoldings,
        Call::SetNode,
        Call::ForgetNode,
        Call::SetTenant,
        Call::RemoveTenant,
        Call::FetchBlocks,
        Call::OfferBlocks,
        Call::SubscribeEvents,
        Call::Health,
        Call::Metrics,
        Call::Status,
        Call::ReadBlock,
        Call::Trace,
    ];

    /// Returns the call of a gRPC method, `/PACKAGE.Service/Method`; none if the table does not have it.
    pub fn of_grpc(path: &str) -> Option<Call> {
        let (service, method) = path.strip_prefix('/')?.rsplit_once('/')?;
        let (_, service) = service.rsplit_once('.')?;
        Call::ALL.into_iter().find(|call| call.grpc_method() == Some((service, method)))
    }

    /// Service and method of a gRPC call.
    pub fn grpc_method(self) -> Option<(&'static str, &'static str)> {
        Some(match self {
            Call::Register => ("Membership", "Register"),
            Call::Heartbeat => ("Membership", "Heartbeat"),
            Call::ListNodes => ("Membership", "ListNodes"),
            Call::WatchNodes => ("Membership", "WatchNodes"),
            Call::ListMembers => ("Membership", "ListMembers"),
            Call::WatchMembers => ("Membership", "WatchMembers"),
            Call::ForgetNode => ("Membership", "ForgetNode"),
            Call::Slots => ("Directory", "Slots"),
            Call::Update => ("Directory", "Update"),
            Call::Lookup => ("Directory", "Lookup"),
            Call::Describe => ("Directory", "Describe"),
            Call::FollowEvents => ("Events", "Follow"),
            Call::Report => ("Placement", "Report"),
            Call::Place => ("Placement", "Place"),
            Call::Route => ("Placement", "Route"),
            Call::SetNode => ("Placement", "SetNode"),
            Call::SetTenant => ("Placement", "SetTenant"),
            Call::RemoveTenant => ("Placement", "RemoveTenant"),
            Call::ListTenants => ("Placement", "ListTenants"),
            Call::ListHoldings => ("Placement", "ListHoldings"),
            Call::FetchBlocks
            | Call::OfferBlocks
            | Call::SubscribeEvents
            | Call::Health
            | Call::Metrics
            | Call::Status
            | Call::ReadBlock
            | Call::Trace => return None,
        })
    }

    /// The call as a verb with its object.
    pub fn action(self) -> &'static str {
        match self {
            Call::Register => "register",
            Call::Heartbeat => "send heartbeats",
            Call::Slots => "read the slots of an inventory",
            Call::Update => "announce and withdraw blocks",
            Call::Report => "report usage",
            Call::Place => "ask for places of copies",
            Call::Lookup => "look up blocks",
            Call::Route => "ask for nodes of a prompt",
            Call::ListNodes => "list nodes",
            Call::WatchNodes => "follow nodes",
            Call::ListMembers => "list members",
            Call::WatchMembers => "follow members",
            Call::Describe => "read the sizes of the directory",
            Call::FollowEvents => "follow changes of the directory",
            Call::ListTenants => "list budgets of tenants",
            Call::ListHoldings => "list usage of tenants",
            Call::SetNode => "set modes of nodes",
            Call::ForgetNode => "forget nodes",
            Call::SetTenant => "set budgets of tenants",
            Call::RemoveTenant => "remove budgets of tenants",
            Call::FetchBlocks => "load blocks of a tenant from a peer",
            Call::OfferBlocks => "offer copies of blocks to a peer",
            Call::SubscribeEvents => "subscribe to KV events",
            Call::Health => "probe the health",
            Call::Metrics => "read metrics",
            Call::Status => "read the state of a process",
            Call::ReadBlock => "read the state of a block",
            Call::Trace => "record requests of engines",
        }
    }
}

/// Roles with access to a call, for example `agent/NODE, operator or admin`.
fn roles_of(call: Call) -> String {
    let roles = [
        ("agent/NODE", Role::Agent(String::new())),
        ("member", Role::Member),
        ("operator", Role::Operator),
        ("admin", Role::Admin),
        ("console", Role::Console),
    ];
    let names: Vec<&str> = roles
        .iter()
        .filter(|(_, role)| decide(role, call) != Decision::Refused)
        .map(|(name, _)| *name)
        .collect();
    match names.split_last() {
        Some((last, [])) => (*last).to_owned(),
        Some((last, others)) => format!("{} or {last}", others.join(", ")),
        None => "a role that may do so; none does".to_owned(),
    }
}
