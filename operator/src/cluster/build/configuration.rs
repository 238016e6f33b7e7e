//! Configurations of agents and members, in their own TOML. Every field of the cluster that stands for one of theirs is here.

use reprise_crds::cluster::{EtcdMode, EvictionPolicy, HugePages};
use reprise_crds::fields::{LogFormat, LogSettings, Quantity};
use reprise_crds::tenant::{Quota, Quotas};
use reprise_crds::{KVCacheCluster, SSDPool};
use reprise_policy::ByteSize;
use serde_json::{Map, Value, json};

use crate::cluster::dereference::Referred;
use crate::cluster::{GRPC_PORT, MEMBER_ADMIN_PORT};
use crate::digest;
use crate::names::ClusterNames;
use crate::tenant::dereference::left_out;

/// Where pods find their configuration.
pub const FOLDER: &str = "/etc/reprise";
/// The agents' file.
pub const AGENT_FILE: &str = "agent.toml";
/// Agents' own state on their nodes, a directory for each cluster.
const STATE_FOLDER: &str = "/var/lib/reprise";
/// Where members find authorities and certificate for etcd.
pub const TLS_FOLDER: &str = "/etc/reprise-etcd/tls";
/// Where members find our certificate for somebody else's etcd.
pub const CLIENT_FOLDER: &str = "/etc/reprise-etcd/client";
/// Where members find the password of etcd's user.
pub const USER_FOLDER: &str = "/etc/reprise-etcd/user";

/// Configuration of the agents of a cluster. Their node's name, the address of the pod and what they open come from elsewhere.
pub fn agent(cluster: &KVCacheCluster, referred: &Referred) -> String {
    let (agents, cache) = (&cluster.spec.agents, &cluster.spec.cache);
    let mut whole = json!({
        "session": {
            "socket": format!("{}/agent.sock", agents.socket.directory),
            "mode": agents.socket.mode,
            "allow_uids": agents.socket.allow_uids,
        },
        "arena": {
            "bytes": size(&cache.dram),
            "region_bytes": size(&cache.region_size),
            "huge_pages": match cache.huge_pages {
                HugePages::Prefer => "prefer",
                HugePages::Never => "never",
            },
        },
        "cache": {
            "eviction": { "kind": match cache.eviction { EvictionPolicy::PriorityLru => "priority_lru" } },
            "arena_unsaved_permille": cache.shares.unsaved_permille,
            "arena_session_permille": cache.shares.session_permille,
            "arena_serves_permille": cache.shares.serves_permille,
        },
        "writeback": { "delay": cache.writeback.delay, "bytes": size(&cache.writeback.size) },
        "peers": {
            "listen": format!("0.0.0.0:{}", agents.peers.port),
            "credit_bytes": size(&agents.peers.credit),
            "stall_timeout": agents.peers.stall_timeout,
        },
        "controlplane": {
            "address": referred.names.control_plane_address(),
            "lookup_timeout": cache.limits.lookup_timeout,
        },
        "placement": {
            "bandwidth": size(&cache.placement.bandwidth),
            "hot_reads": cache.placement.hot_reads,
            "hot_window": cache.placement.hot_window,
        },
        "admin": { "listen": format!("0.0.0.0:{}", agents.admin_port) },
        "limits": {
            "load_deadline": cache.limits.load_deadline,
            "load_hold": cache.limits.load_hold,
            "reservation": cache.limits.reservation,
            "read_bytes": size(&cache.limits.read_size),
        },
        "kubernetes": { "state_directory": state_directory(&referred.names) },
        "log": log(&agents.log),
    });
    if let Some((pool, free_permille)) = pool_settings(referred) {
        whole["pool"] = pool;
        whole["cache"]["pool_free_permille"] = free_permille;
    }
    let left_out = left_out(cluster, &referred.tenants);
    let tenants = referred.tenants.iter().filter_map(|tenant| {
        let reserves = !left_out.contains(tenant.metadata.name.as_deref().unwrap_or_default());
        tenant_section(tenant, reserves)
    });
    let tenants: Vec<Value> = tenants.collect();
    if !tenants.is_empty() {
        whole["tenants"] = json!(tenants);
    }
    text(&whole)
}

/// What an agent has one value of for all its pools: the section of pools, and what is kept free of them. All that are accepted agree (`crate::plan`); of
/// those that are refused nodes keep what they had.
fn pool_settings(referred: &Referred) -> Option<(Value, Value)> {
    let key = referred.names.key();
    let (accepted, refused): (Vec<_>, Vec<_>) =
        referred.pools.iter().partition(|named| named.plan.refused.is_none());
    let of_spec = |pool: &SSDPool| {
        let spec = &pool.spec;
        let pool = json!({ "segment_bytes": size(&spec.segment_size), "queue_depth": spec.queue_depth });
        (pool, json!(spec.watermarks.free_permille))
    };
    if let Some(pool) = accepted.iter().find_map(|named| named.bound(&key)) {
        return Some(of_spec(pool));
    }
    let pool = refused.iter().find_map(|named| named.bound(&key))?;
    let before = || -> Option<(Value, Value)> {
        let running: Value = toml::from_str(referred.running.as_ref()?).ok()?;
        let of_pool = |field: &str| Some(running.get("pool")?.get(field)?.clone());
        let pool =
            json!({ "segment_bytes": of_pool("segment_bytes")?, "queue_depth": of_pool("queue_depth")? });
        Some((pool, running.get("cache")?.get("pool_free_permille")?.clone()))
    };
    Some(before().unwrap_or_else(|| of_spec(pool)))
}

/// Where an agent keeps what it was told last, on its node.
pub fn state_directory(names: &ClusterNames) -> String {
    format!("{STATE_FOLDER}/{}", names.name)
}

/// What an agent has to know of a tenant, and whether it reserves memory for it; nothing of one whose limits are those of everybody.
fn tenant_section(tenant: &reprise_crds::CacheTenant, reserves: bool) -> Option<Value> {
    let (quotas, number) = (&tenant.spec.per_node, tenant.spec.number);
    if *quotas == Quotas::default() && number.is_none() {
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
    Some(section)
}

fn quota(quota: &Quota) -> Value {
    let mut section = json!({ "reserved": size(&quota.reserved) });
    if let Some(limit) = &quota.limit {
        section["limit"] = size(limit);
    }
    section
}

/// Files of all members, by name. They differ in the member's name and address only.
pub fn members(cluster: &KVCacheCluster, names: &ClusterNames) -> Map<String, Value> {
    (0..cluster.spec.control_plane.replicas)
        .map(|index| {
            let member = names.member(index);
            (format!("{member}.toml"), json!(self::member(cluster, names, &member)))
        })
        .collect()
}

/// Configuration of one member.
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
    });
    if let Some(publish) = &spec.events.publish {
        let events = whole["events"].as_object_mut().expect("made above");
        events.insert("publish".to_owned(), json!(format!("0.0.0.0:{}", publish.port)));
        events.insert("replay".to_owned(), json!(format!("0.0.0.0:{}", publish.replay_port)));
        events.insert("topic".to_owned(), json!(publish.topic));
        events.insert("buffer_steps".to_owned(), json!(publish.buffer_steps));
        events.insert("subscribers".to_owned(), json!(publish.subscribers));
    }
    text(&whole)
}

/// Where the members' store is, and how it is reached.
fn store(cluster: &KVCacheCluster, names: &ClusterNames) -> Value {
    let etcd = &cluster.spec.etcd;
    let mut store = json!({ "kind": "etcd", "prefix": etcd.key_prefix });
    match (etcd.mode, &etcd.external) {
        (EtcdMode::Managed, _) | (EtcdMode::External, None) => {
            let replicas = etcd.managed.clone().unwrap_or_default().replicas;
            let endpoints: Vec<String> = (0..replicas)
                .map(|index| format!("https://{}", super::etcd::address(names, index)))
                .collect();
            store["endpoints"] = json!(endpoints);
            store["tls"] = json!({
                "ca_file": format!("{TLS_FOLDER}/ca.crt"),
                "cert_file": format!("{TLS_FOLDER}/client.crt"),
                "key_file": format!("{TLS_FOLDER}/client.key"),
            });
        }
        (EtcdMode::External, Some(external)) => {
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
    let format = match settings.format {
        LogFormat::Json => "json",
        LogFormat::Text => "text",
    };
    json!({ "format": format, "level": settings.level })
}

/// Bytes as our configurations write them.
fn size(quantity: &Quantity) -> Value {
    // The API server has checked the pattern, so only an amount beyond 64 bits is none; the process that reads it will say so.
    quantity.bytes().map_or_else(|_| json!(quantity), |bytes| json!(ByteSize(bytes)))
}

fn text(whole: &Value) -> String {
    toml::to_string(whole).expect("tables of texts and numbers are TOML")
}

/// Digest of the agents' configuration, as a CacheNode has it.
pub fn agent_digest(cluster: &KVCacheCluster, referred: &Referred) -> String {
    digest::of(&agent(cluster, referred))
}
