//! TOML configurations of agents and members. All cluster fields that map to their settings are handled
//! here.

use std::fmt::Display;

use reprise_crds::KVCacheCluster;
use reprise_crds::cluster::TraceAccess;
use reprise_crds::fields::{LogSettings, Quantity};
use reprise_crds::tenant::{Bandwidth, Quota, Quotas};
use reprise_identity::credentials::{AUTHORITIES_FILE, CERTIFICATE_FILE, KEY_FILE};
use reprise_policy::ByteSize;
use serde_json::{Map, Value, json};

use super::certificates::CERTIFICATES_FOLDER;
use crate::framework::digest;
use crate::reconcile::cluster::MEMBER_ADMIN_PORT;
use crate::reconcile::cluster::etcd::build::address;
use crate::reconcile::cluster::inputs::AgentConfigInputs;
use crate::reconcile::names::ClusterNames;
use crate::reconcile::names::GRPC_PORT;
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
/// Directory of members with the authorities of an external etcd.
pub const TLS_FOLDER: &str = "/etc/reprise-etcd/tls";
/// Directory of members with the client certificate for an external etcd.
pub const CLIENT_FOLDER: &str = "/etc/reprise-etcd/client";
/// Directory of members with the password for etcd.
pub const USER_FOLDER: &str = "/etc/reprise-etcd/user";

/// Returns the configuration of a cluster's agents. The node's name, the pod's address and the devices to
/// open come from other sources.
pub fn agent(cluster: &KVCacheCluster, agent_config: &AgentConfigInputs) -> String {
    let (agents, cache) = (&cluster.spec.agents, &cluster.spec.cache);
    let mut whole = json!({
        "session": {
            "socket": format!("{}/agent.sock", agents.socket.directory),
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
    let tenants = agent_config.tenants.iter().filter_map(|tenant| {
        let reserves = !unreserved.contains(tenant.metadata.name.as_deref().unwrap_or_default());
        tenant_section(tenant, reserves)
    });
    let tenants: Vec<Value> = tenants.collect();
    if !tenants.is_empty() {
        whole["tenants"] = json!(tenants);
    }
    text(&whole)
}

/// Returns the settings that an agent has once for all its pools: the `pool` section, and the free share to
/// keep. Accepted pools agree on them (`crate::reconcile::assignment`). Those of a rejected pool apply only if no pool is
/// accepted, so that an invalid edit restarts no agent.
fn pool_settings(agent_config: &AgentConfigInputs) -> Option<(Value, Value)> {
    let key = agent_config.names.key();
    let bound = || agent_config.pools.iter().filter_map(|named| Some((named, named.bound_pool(&key)?)));
    let accepted = bound().find(|(named, _)| named.assignment.refused.is_none());
    let spec = &accepted.or_else(|| bound().next())?.1.spec;
    let mut pool = json!({
        "segment_bytes": size(&spec.segment_size),
        "queue_depth": spec.queue_depth,
        "eviction": { "kind": choice(spec.eviction) },
        "admission": choice(spec.admission),
    });
    if let Some(budget) = &spec.daily_write_budget {
        pool["daily_write_budget"] = size(budget);
    }
    Some((pool, json!(spec.watermarks.free_permille)))
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
fn tenant_section(tenant: &reprise_crds::CacheTenant, reserves: bool) -> Option<Value> {
    let (quotas, number, bandwidth) = (&tenant.spec.per_node, tenant.spec.number, &tenant.spec.bandwidth);
    if *quotas == Quotas::default() && number.is_none() && *bandwidth == Bandwidth::default() {
        return None;
    }
    let mut section = json!({
        "name": tenant.metadata.name,
        "dram": quota(&quotas.dram),
        "nvme": quota(&quotas.ssd),
    });
    if !reserves {
        section["dram"]["reserved"] = json!(ByteSize(0));
    }
    if let Some(number) = number {
        section["number"] = json!(number);
    }
    if *bandwidth != Bandwidth::default() {
        section["bandwidth"] = json!({ "weight": bandwidth.weight });
    }
    Some(section)
}

fn quota(quota: &Quota) -> Value {
    let mut section = json!({ "reserved": size(&quota.reserved) });
    if let Some(limit) = &quota.limit {
        section["limit"] = size(limit);
    }
    section
}

/// Returns the files of all members by name. They differ only in the member's name and address.
pub fn members(cluster: &KVCacheCluster, names: &ClusterNames) -> Map<String, Value> {
    (0..cluster.spec.control_plane.replicas)
        .map(|index| {
            let member = names.member(index);
            (format!("{member}.toml"), json!(self::member(cluster, names, &member)))
        })
        .collect()
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
        whole["events"] = json!({
            "history": size(&spec.events.history),
            "publish": format!("0.0.0.0:{}", publish.port),
            "replay": format!("0.0.0.0:{}", publish.replay_port),
            "topic": publish.topic,
            "buffer_steps": publish.buffer_steps,
            "subscribers": publish.subscribers,
        });
    }
    text(&whole)
}

/// Returns the members' store settings.
fn store(cluster: &KVCacheCluster, names: &ClusterNames) -> Value {
    let etcd = &cluster.spec.etcd;
    let mut store = json!({ "kind": "etcd", "prefix": etcd.key_prefix });
    match &etcd.external {
        None => {
            let replicas = etcd.managed.clone().unwrap_or_default().replicas;
            let endpoints: Vec<String> =
                (0..replicas).map(|index| format!("https://{}", address(names, index))).collect();
            store["endpoints"] = json!(endpoints);
            store["tls"] = json!({
                "ca_file": format!("{CERTIFICATES_FOLDER}/{AUTHORITIES_FILE}"),
                "cert_file": format!("{CERTIFICATES_FOLDER}/{CERTIFICATE_FILE}"),
                "key_file": format!("{CERTIFICATES_FOLDER}/{KEY_FILE}"),
            });
        }
        Some(external) => {
            store["endpoints"] = json!(external.endpoints);
            if let Some(tls) = &external.tls {
                store["tls"] = json!({ "ca_file": format!("{TLS_FOLDER}/ca.crt") });
                if tls.client_secret_ref.is_some() {
                    store["tls"]["cert_file"] = json!(format!("{CLIENT_FOLDER}/tls.crt"));
                    store["tls"]["key_file"] = json!(format!("{CLIENT_FOLDER}/tls.key"));
                }
                if let Some(name) = &tls.server_name {
                    store["tls"]["server_name"] = json!(name);
                }
            }
            if let Some(user) = &external.user {
                store["user"] =
                    json!({ "name": user.name, "password_file": format!("{USER_FOLDER}/password") });
            }
        }
    }
    store
}

fn log(settings: &LogSettings) -> Value {
    json!({ "format": choice(settings.format), "level": settings.level })
}

/// Formats bytes for our configurations.
fn size(quantity: &Quantity) -> Value {
    // The CRD schema validates the pattern, so only amounts beyond 64 bits fail. They are passed through, and
    // the process that reads them reports the error.
    quantity.bytes().map_or_else(|_| json!(quantity), |bytes| json!(ByteSize(bytes)))
}

fn text(whole: &Value) -> String {
    toml::to_string(whole).expect("serializable settings")
}

/// Digest of the agents' configuration, as in a CacheNode.
pub fn agent_digest(cluster: &KVCacheCluster, agent_config: &AgentConfigInputs) -> String {
    digest::of(&agent(cluster, agent_config))
}
