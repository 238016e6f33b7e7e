//! The members of the control plane.

use kube::KubeSchema;
use serde::{Deserialize, Serialize};

use super::default_of_nothing;
use crate::fields::{LabelKey, Labels, LogSettings, Quantity, Resources, Span, Toleration, Topic};

/// The members of the control plane, a StatefulSet.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ControlPlane {
    /// Members. They share the keys among them; one that is gone is replaced by the others within seconds. A change moves
    /// a part of the directory, which agents tell anew; local hits go on.
    #[serde(default = "replicas")]
    #[schemars(range(min = 1, max = 64))]
    pub replicas: u32,
    /// CPU and memory of a member. Absent: reckoned from the nodes' capacity at 64 bytes a block.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resources: Option<Resources>,
    /// Nodes that members may run on. Empty: all.
    #[serde(default, skip_serializing_if = "std::collections::BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 16))]
    pub node_selector: Labels,
    /// Taints that members may run beside.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    pub tolerations: Vec<Toleration>,
    /// Label of nodes over whose values members are spread as evenly as can be.
    #[serde(default = "spread_over")]
    pub spread_over: LabelKey,
    /// Silence after which the others count a member as gone; etcd grants 2 s at the least with its own defaults.
    #[serde(default = "time_to_live")]
    #[x_kube(validation = Rule::new("duration(self) >= duration('1s') && duration(self) <= duration('60s')")
        .message("controlPlane.timeToLive is 1s to 60s: choose a time between"))]
    pub time_to_live: Span,
    /// When silent nodes die.
    #[serde(default)]
    pub membership: Membership,
    /// The stream of changes of the directory.
    #[serde(default)]
    pub events: Events,
    /// Bounds of a member.
    #[serde(default)]
    pub limits: Bounds,
    /// The members' log.
    #[serde(default)]
    pub log: LogSettings,
}

/// When silent nodes die. A change restarts the members one by one.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("duration(self.deadAfter) >= duration(self.heartbeatEvery) + duration(self.heartbeatEvery)")
    .message("a node may miss one beat without dying: set membership.deadAfter to at least twice heartbeatEvery"))]
#[x_kube(validation = Rule::new("duration(self.forgetAfter) >= duration(self.deadAfter)")
    .message("a node dies before it is forgotten: set membership.forgetAfter to at least deadAfter"))]
pub struct Membership {
    /// How often agents beat.
    #[serde(default = "heartbeat_every")]
    #[x_kube(validation = Rule::new("duration(self) >= duration('10ms') && duration(self) <= duration('60s')")
        .message("membership.heartbeatEvery is 10ms to 60s: choose a time between"))]
    pub heartbeat_every: Span,
    /// Silence after which a node's blocks are not offered to others.
    #[serde(default = "dead_after")]
    pub dead_after: Span,
    /// Silence after which a node must register again and announce everything.
    #[serde(default = "forget_after")]
    #[x_kube(validation = Rule::new("duration(self) <= duration('24h')")
        .message("membership.forgetAfter is at most 24h: a node that is away for longer starts anew"))]
    pub forget_after: Span,
}

/// The stream of changes of the directory, for routers and `reprise events`.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Events {
    /// Memory of each member for the last changes, 20 bytes each. Who comes back later than that gets a snapshot.
    #[serde(default = "history")]
    #[x_kube(validation = Rule::new("quantity(self).compareTo(quantity('1Mi')) >= 0 && quantity(self).compareTo(quantity('64Gi')) <= 0")
        .message("events.history is 1Mi to 64Gi: choose a size between"))]
    pub history: Quantity,
    /// Publishing in vLLM's KV-event format (ZeroMQ, not authenticated). Absent: off.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub publish: Option<Publishing>,
}

/// Publishing of KV events.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("self.port != self.replayPort")
    .message("events and their replay need a port each: change publish.port or publish.replayPort"))]
pub struct Publishing {
    /// Port where batches are published.
    #[serde(default = "publish_port")]
    #[schemars(range(min = 1024, max = 65_535))]
    pub port: u16,
    /// Port where batches that were missed are asked for.
    #[serde(default = "replay_port")]
    #[schemars(range(min = 1024, max = 65_535))]
    pub replay_port: u16,
    /// First frame of every message.
    #[serde(default = "topic")]
    pub topic: Topic,
    /// Batches that are kept for replay, 5 KiB each at the most.
    #[serde(default = "buffer_steps")]
    #[schemars(range(min = 1, max = 1_048_576))]
    pub buffer_steps: u32,
    /// Connections at once, to each port.
    #[serde(default = "subscribers")]
    #[schemars(range(min = 1, max = 1024))]
    pub subscribers: u32,
}

/// Bounds of a member. Who comes beyond them is told to come again.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Bounds {
    /// Calls of the directory at once, working or waiting.
    #[serde(default = "calls_at_once")]
    #[schemars(range(min = 1, max = 65_536))]
    pub calls_at_once: u32,
    /// Streams at once that follow nodes and members.
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

default_of_nothing!(ControlPlane, Membership, Events, Publishing, Bounds);
