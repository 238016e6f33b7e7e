//! TOML configurations of agents and members. All cluster fields that map to their settings are handled
//! here.

use std::fmt::Display;

use kube::ResourceExt;
use reprise_crds::cluster::TraceAccess;
use reprise_crds::fields::{LogSettings, Quantity};
use reprise_crds::tenant::{Bandwidth, Quota, Quotas};
use reprise_crds::{CacheTenant, KVCacheCluster};
use reprise_identity::credentials::{AUTHORITIES_FILE, CERTIFICATE_FILE, KEY_FILE};
use reprise_policy::ByteSize;
use serde_json::{Value, json};

use super::certificates::CERTIFICATES_FOLDER;
use super::connection::socket;
use super::pods::without_empty;
use crate::framework::digest;
use crate::reconcile::cluster::MEMBER_ADMIN_PORT;
use crate::reconcile::cluster::dereference::AgentConfigInputs;
use crate::reconcile::cluster::etcd;
use crate::reconcile::cluster::etcd::external::PASSWORD_FILE;
use crate::reconcile::names::{ClusterNames, GRPC_PORT};
use crate::reconcile::tenant::capacity::without_reservation;

/// Directory of the configuration in pods.
pub const FOLDER: &str = "/etc/reprise";
/// Name of the agents' configuration file.
pub const AGENT_FILE: &str = "agent.toml";
/// Directory with the isolation salts of tenants in agents' pods.
pub const SALTS_FOLDER: &str = "/etc/reprise-salts";
/// Directory with the encryption keys of tenants in agents' pods.
pub const KEYS_FOLDER: &str = "/etc/reprise-keys";
/// Directory on nodes for the agents' state, with a subdirectory per cluster.
const STATE_FOLDER: &str = "/var/lib/reprise";
/// Directory of members with the Secrets of an external etcd.
pub const ETCD_FOLDER: &str = "/etc/reprise-etcd";

/// Returns the configuration of a cluster's agents. The node's name, the pod's address and the devices to
/// open come from other sources.
pub fn agent(cluster: &KVCacheCluster, agent_config: &AgentConfigInputs) -> String {
    let (agents, cache) = (&cluster.spec.agents, &cluster.spec.cache);
    let mut whole = json!({
        "session": {
            "socket": socket(cluster),
            "mode": agents.socket.mode,
            "allow_uids": agents.socket.allow_uids,
            "salts": SALTS_FOLDER,
        },
        "encryption": { "keys": KEYS_FOLDER },
        "arena": {
            "bytes": size(&cache.dram),
            "region_bytes": size(&cache.region_size),
            "huge_pages": choice(cache.huge_pages),
        },
        "cache": {
            "eviction": { "kind": choice(cache.eviction) },
            "arena_unsaved_permille": cache.shares.unsaved_permille,
            "arena_session_permille": cache.shares.session_permille,
            "arena_serves_permille": cache.shares.serves_permille,
        },
        "writeback": {
            "delay": cache.writeback.delay,
            "bytes": size(&cache.writeback.size),
            "slack_delay": cache.writeback.slack_delay,
        },
        "peers": {
            "listen": format!("0.0.0.0:{}", agents.peers.port),
            "credit_bytes": size(&agents.peers.credit),
            "stall_timeout": agents.peers.stall_timeout,
        },
        "controlplane": {
            "address": agent_config.names.control_plane_address(),
            "lookup_timeout": cache.limits.lookup_timeout,
        },
        "placement": {
            "bandwidth": size(&cache.placement.bandwidth),
            "hot_reads": cache.placement.hot_reads,
            "hot_window": cache.placement.hot_window,
        },
        "prefetch": {
            "arena_permille": cache.prefetch.arena_permille,
            "high_water_permille": cache.prefetch.bandwidth_permille,
            "window": cache.prefetch.window,
        },
        "retention": {
            "permille": cache.retention.permille,
            "blocks_per_tenant": cache.retention.blocks_per_tenant,
            "ttl_max": cache.retention.ttl_max,
        },
        "admin": {
            "listen": format!("0.0.0.0:{}", agents.admin_port),
            "trace": agents.trace == TraceAccess::LocalClients,
        },
        "limits": {
            "load_deadline": cache.limits.load_deadline,
            "load_hold": cache.limits.load_hold,
            "reservation": cache.limits.reservation,
            "read_bytes": size(&cache.limits.read_size),
        },
        "kubernetes": { "state_directory": state_directory(&agent_config.names) },
        "log": log(&agents.log),
        "tls": { "folder": CERTIFICATES_FOLDER },
    });
    if let Some((pool, free_permille)) = pool_settings(agent_config) {
        whole["pool"] = pool;
        whole["cache"]["pool_free_permille"] = free_permille;
    }
    let unreserved = without_reservation(cluster, &agent_config.tenants);
    let reserves = |tenant: &CacheTenant| !unreserved.contains(&tenant.name_any());
    let sections = agent_config.tenants.iter().filter_map(|tenant| tenant_section(tenant, reserves(tenant)));
    let tenants: Vec<Value> = sections.collect();
    if !tenants.is_empty() {
        whole["tenants"] = json!(tenants);
    }
    text(&whole)
}

/// Returns the settings that an agent has once for all its pools: the `pool` section, and the free share to
/// keep. Accepted pools agree on them (`crate::reconcile::assignment`). Those of a rejected pool apply only if no pool is
/// accepted, so that an invalid edit restarts no agent.
fn pool_settings(agent_config: &AgentConfigInputs) -> Option<(Value, Value)> {
    let accepted = agent_config.bound_pools().find(|(named, _)| named.assignment.refused.is_none());
    let spec = &accepted.or_else(|| agent_config.bound_pools().next())?.1.spec;
    let pool = json!({
        "segment_bytes": size(&spec.segment_size),
        "queue_depth": spec.queue_depth,
        "eviction": { "kind": choice(spec.eviction) },
        "admission": choice(spec.admission),
        "daily_write_budget": spec.daily_write_budget.as_ref().map(size),
    });
    Some((without_empty(pool), json!(spec.watermarks.free_permille)))
}

/// Returns a choice as our configurations spell it: `second_use` for `SecondUse`.
fn choice(value: impl Display) -> String {
    let mut text = String::new();
    for letter in value.to_string().chars() {
        if letter.is_ascii_uppercase() && !text.is_empty() {
            text.push('_');
        }
        text.push(letter.to_ascii_lowercase());
    }
    text
}

/// Returns the directory on a node in which an agent persists its state.
pub fn state_directory(names: &ClusterNames) -> String {
    format!("{STATE_FOLDER}/{}", names.name)
}

/// Returns the tenant's section in the agents' configuration; `None` if it only has default limits.
/// `reserves` is whether its memory reservation applies.
fn tenant_section(tenant: &CacheTenant, reserves: bool) -> Option<Value> {
    let (quotas, number, bandwidth) = (&tenant.spec.per_node, tenant.spec.number, &tenant.spec.bandwidth);
    if *quotas == Quotas::default() && number.is_none() && *bandwidth == Bandwidth::default() {
        return None;
    }
    let reserved = if reserves { size(&quotas.dram.reserved) } else { json!(ByteSize(0)) };
    let has_weight = *bandwidth != Bandwidth::default();
    Some(without_empty(json!({
        "name": tenant.metadata.name,
        "dram": quota(&quotas.dram, &reserved),
        "nvme": quota(&quotas.ssd, &size(&quotas.ssd.reserved)),
        "number": number,
        "bandwidth": has_weight.then(|| json!({ "weight": bandwidth.weight })),
    })))
}

fn quota(quota: &Quota, reserved: &Value) -> Value {
    without_empty(json!({ "reserved": reserved, "limit": quota.limit.as_ref().map(size) }))
}

/// Returns the configuration of one member.
pub fn member(cluster: &KVCacheCluster, names: &ClusterNames, member: &str) -> String {
    let spec = &cluster.spec.control_plane;
    let host = format!("{member}.{}.{}.svc", names.members(), names.namespace);
    let mut whole = json!({
        "listen": format!("0.0.0.0:{GRPC_PORT}"),
        "admin": format!("0.0.0.0:{MEMBER_ADMIN_PORT}"),
        "store": store(cluster, names),
        "member": {
            "name": member,
            "advertise": format!("{host}:{GRPC_PORT}"),
            "time_to_live": spec.time_to_live,
        },
        "membership": {
            "heartbeat_every": spec.membership.heartbeat_every,
            "dead_after": spec.membership.dead_after,
            "forget_after": spec.membership.forget_after,
        },
        "events": { "history": size(&spec.events.history) },
        "limits": { "calls_at_once": spec.limits.calls_at_once, "watchers": spec.limits.watchers },
        "log": log(&spec.log),
        "tls": { "folder": CERTIFICATES_FOLDER },
    });
    if let Some(publish) = &spec.events.publish {
        let events = &mut whole["events"];
        events["publish"] = json!(format!("0.0.0.0:{}", publish.port));
        events["replay"] = json!(format!("0.0.0.0:{}", publish.replay_port));
        events["topic"] = json!(publish.topic);
        events["buffer_steps"] = json!(publish.buffer_steps);
        events["subscribers"] = json!(publish.subscribers);
    }
    text(&whole)
}

/// Returns the members' store settings.
fn store(cluster: &KVCacheCluster, names: &ClusterNames) -> Value {
    let etcd = &cluster.spec.etcd;
    let mut store = json!({ "kind": "etcd", "prefix": etcd.key_prefix });
    let (folder, has_tls, has_client) = match &etcd.external {
        None => {
            store["endpoints"] = json!(etcd::build::endpoints(cluster, names));
            (CERTIFICATES_FOLDER, true, true)
        }
        Some(external) => {
            store["endpoints"] = json!(external.endpoints);
            let tls = external.tls.as_ref();
            (ETCD_FOLDER, tls.is_some(), tls.is_some_and(|tls| tls.client_secret_ref.is_some()))
        }
    };
    let file = |name: &str| json!(format!("{folder}/{name}"));
    let external = etcd.external.as_ref();
    if has_tls {
        store["tls"] = without_empty(json!({
            "ca_file": file(AUTHORITIES_FILE),
            "cert_file": has_client.then(|| file(CERTIFICATE_FILE)),
            "key_file": has_client.then(|| file(KEY_FILE)),
            "server_name": external.and_then(|external| external.tls.as_ref()?.server_name.as_ref()),
        }));
    }
    if let Some(user) = external.and_then(|external| external.user.as_ref()) {
        store["user"] = json!({ "name": user.name, "password_file": file(PASSWORD_FILE) });
    }
    store
}

fn log(settings: &LogSettings) -> Value {
    json!({ "format": choice(settings.format), "level": settings.level })
}

/// Formats bytes for our configurations.
fn size(quantity: &Quantity) -> Value {
    // The schema permits only quantities.
    json!(ByteSize(quantity.bytes().unwrap_or_default()))
}

fn text(whole: &Value) -> String {
    toml::to_string(whole).expect("serializable settings")
}

/// Digest of the agents' configuration, as in a CacheNode.
pub fn agent_digest(cluster: &KVCacheCluster, agent_config: &AgentConfigInputs) -> String {
    digest::of(&agent(cluster, agent_config))
}
