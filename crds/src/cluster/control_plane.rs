//! The members of the control plane.

use kube::KubeSchema;
use serde::{Deserialize, Serialize};

use super::default_from_schema;
use crate::fields::{LabelKey, Labels, LogSettings, Quantity, Resources, Span, Toleration, Topic};

/// Members of the control plane, a StatefulSet.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ControlPlane {
    /// Number of members. The members share the keys; the others replace a failed one within seconds. A
    /// change moves a part of the directory, which agents then announce again; local hits continue.
    #[serde(default = "replicas")]
    #[schemars(range(min = 1, max = 64))]
    pub replicas: u32,
    /// CPU and memory of a member. Absent: estimated from the nodes' capacity at 64 bytes per block.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resources: Option<Resources>,
    /// Labels of the nodes that members may run on. Empty: all nodes.
    #[serde(default, skip_serializing_if = "std::collections::BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 16))]
    pub node_selector: Labels,
    /// Tolerations of the member pods.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    pub tolerations: Vec<Toleration>,
    /// Node label over whose values members are spread evenly, as far as possible.
    #[serde(default = "spread_over")]
    pub spread_over: LabelKey,
    /// Time to live of a member's etcd lease, from 1s to 60s. The other members replace the member when it
    /// expires. With default settings, etcd grants at least 2s.
    #[serde(default = "time_to_live")]
    #[x_kube(validation = Rule::new("duration(self) >= duration('1s') && duration(self) <= duration('60s')")
        .message("controlPlane.timeToLive is outside 1s to 60s: set a duration in that range"))]
    pub time_to_live: Span,
    /// Timeouts of nodes that send no heartbeat.
    #[serde(default)]
    pub membership: Membership,
    /// Event stream of the directory.
    #[serde(default)]
    pub events: Events,
    /// Limits of a member.
    #[serde(default)]
    pub limits: Bounds,
    /// Log of the members.
    #[serde(default)]
    pub log: LogSettings,
}

/// Timeouts of nodes that send no heartbeat. A change restarts the members one by one.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("duration(self.deadAfter) >= duration(self.heartbeatEvery) + duration(self.heartbeatEvery)")
    .message("membership.deadAfter is too short to survive one missed heartbeat: set it to at least twice heartbeatEvery"))]
#[x_kube(validation = Rule::new("duration(self.forgetAfter) >= duration(self.deadAfter)")
    .message("membership.forgetAfter is less than deadAfter: set it to at least deadAfter"))]
pub struct Membership {
    /// Heartbeat interval of agents, from 10ms to 60s.
    #[serde(default = "heartbeat_every")]
    #[x_kube(validation = Rule::new("duration(self) >= duration('10ms') && duration(self) <= duration('60s')")
        .message("membership.heartbeatEvery is outside 10ms to 60s: set a duration in that range"))]
    pub heartbeat_every: Span,
    /// Time without a heartbeat after which a node counts as dead; its blocks are not offered to other
    /// nodes.
    #[serde(default = "dead_after")]
    pub dead_after: Span,
    /// Time without a heartbeat after which the node must register and announce its blocks again. At most
    /// 24h.
    #[serde(default = "forget_after")]
    #[x_kube(validation = Rule::new("duration(self) <= duration('24h')")
        .message("membership.forgetAfter is longer than 24h: set at most 24h"))]
    pub forget_after: Span,
}

/// Event stream of the directory, for routers and `reprise events`.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Events {
    /// Memory of each member for recent events, 20 bytes each. A subscriber that misses older events gets a
    /// snapshot.
    #[serde(default = "history")]
    #[x_kube(validation = Rule::new("quantity(self).compareTo(quantity('1Mi')) >= 0 && quantity(self).compareTo(quantity('64Gi')) <= 0")
        .message("events.history is outside 1Mi to 64Gi: set a size in that range"))]
    pub history: Quantity,
    /// Publishing in vLLM's KV event format over ZeroMQ, without authentication. Absent: off.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub publish: Option<Publishing>,
}

/// Publishing of KV events.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("self.port != self.replayPort")
    .message("publish.port and publish.replayPort need a port each, but are equal: change one of them"))]
pub struct Publishing {
    /// Port for published batches.
    #[serde(default = "publish_port")]
    #[schemars(range(min = 1024, max = 65_535))]
    pub port: u16,
    /// Port for requests of missed batches.
    #[serde(default = "replay_port")]
    #[schemars(range(min = 1024, max = 65_535))]
    pub replay_port: u16,
    /// First frame of every message.
    #[serde(default = "topic")]
    pub topic: Topic,
    /// Batches kept for replay, each at most 5 KiB.
    #[serde(default = "buffer_steps")]
    #[schemars(range(min = 1, max = 1_048_576))]
    pub buffer_steps: u32,
    /// Upper bound on concurrent connections to each port.
    #[serde(default = "subscribers")]
    #[schemars(range(min = 1, max = 1024))]
    pub subscribers: u32,
}

/// Limits of a member. Requests above a limit are rejected and may be retried.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Bounds {
    /// Upper bound on concurrent directory calls, running or queued.
    #[serde(default = "calls_at_once")]
    #[schemars(range(min = 1, max = 65_536))]
    pub calls_at_once: u32,
    /// Upper bound on concurrent watch streams for nodes and members.
    #[serde(default = "watchers")]
    #[schemars(range(min = 1, max = 65_536))]
    pub watchers: u32,
}

fn replicas() -> u32 {
    2
}

fn spread_over() -> LabelKey {
    LabelKey::new("kubernetes.io/hostname")
}

fn time_to_live() -> Span {
    Span::new("2s")
}

fn heartbeat_every() -> Span {
    Span::new("250ms")
}

fn dead_after() -> Span {
    Span::new("1500ms")
}

fn forget_after() -> Span {
    Span::new("8s")
}

fn history() -> Quantity {
    Quantity::new("32Mi")
}

fn publish_port() -> u16 {
    5557
}

fn replay_port() -> u16 {
    5558
}

fn topic() -> Topic {
    Topic::new("kv-events")
}

fn buffer_steps() -> u32 {
    10_000
}

fn subscribers() -> u32 {
    64
}

fn calls_at_once() -> u32 {
    1024
}

fn watchers() -> u32 {
    4096
}

default_from_schema!(ControlPlane, Membership, Events, Publishing, Bounds);
