//! The desired state of a node, parsed from the spec of its `CacheNode`.
//!
//! The object may come from another version of the operator, or be damaged on disk, so each part is parsed
//! separately. Unknown fields are ignored. An invalid value becomes a [`SpecError`], which is reported in a
//! condition; the part keeps its previous state on the node. No object content can stop the agent.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use reprise_crds::fields::{Engine, FallbackEngine, ForeignSignatures, NodeMode, Quantity, Span};
use reprise_crds::node::{PoolClaim, ProfileClaim, QueueClaim};
use reprise_crds::queues::QueueIsolation;
use reprise_crds::slack::content_file;
use serde_json::Value;

/// Maximum length of a failure domain in bytes: that of a Kubernetes label value, as in the schema.
const FAILURE_DOMAIN_BYTES_MAX: usize = 63;

/// Maximum number of claims of a node, as in the schema.
const CLAIMS_MAX: usize = 8;

/// Maximum number of profiles of a node, as in the schema.
const PROFILES_MAX: usize = 16;

/// Maximum number of queue grants of a node, as in the schema.
const QUEUES_MAX: usize = 128;

/// The desired state of a node.
#[derive(Clone, Debug, PartialEq)]
pub struct Desired {
    /// Sequence number within this process, starting at 1; 0 if it was not delivered.
    pub sequence: u64,
    /// Generation of the spec.
    pub generation: i64,
    /// Mode of the node; `None` if invalid: keep the previous one.
    pub mode: Option<NodeMode>,
    /// Failure domain of the node, empty if unknown; `None` if invalid: keep the previous one.
    pub failure_domain: Option<String>,
    /// Digest of the desired configuration file.
    pub configuration_digest: Option<String>,
    /// Pools and their devices on this node.
    pub claims: Vec<Claim>,
    /// Desired slack profiles; `None` if invalid: keep the previous ones.
    pub profiles: Option<Vec<DesiredProfile>>,
    /// Granted queue pairs; `None` if invalid, or not confirmed by the API server: keep the previous ones.
    pub queues: Option<Vec<DesiredQueues>>,
    /// Parts that are invalid.
    pub problems: Vec<SpecError>,
}

/// A slack profile that should be active.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DesiredProfile {
    /// Name of the profile.
    pub name: String,
    /// Digest of the desired revision.
    pub digest: String,
    /// Name of the file with its content, in the directory of the configuration.
    pub file: String,
}

/// Queue pairs granted to a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DesiredQueues {
    /// Unique id of the allocation.
    pub uid: String,
    /// Namespace and name of the allocation.
    pub allocation: String,
    /// Whether the controllers must not be shared with other allocations.
    pub exclusive: bool,
    /// Maximum entries of a queue.
    pub depth: u32,
    /// Maximum bytes of memory that engines register for them; `None`: no limit of the allocation.
    pub memory_bytes: Option<u64>,
    /// Slack profile of the engines that hold them.
    pub slack_profile: Option<String>,
    /// Queue pairs by the controllers' serial numbers.
    pub pairs: BTreeMap<String, u32>,
}

/// The devices that one pool claims on the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claim {
    /// Name of the pool.
    pub pool: String,
    /// Unique id of the pool.
    pub uid: String,
    /// Generation of the pool's spec.
    pub generation: i64,
    /// Where blocks are stored.
    pub source: Source,
    /// Accepted serial numbers of NVMe controllers; empty: any.
    pub serials: Vec<String>,
    /// Namespace of NVMe controllers; `None`: the only one.
    pub namespace: Option<u32>,
    /// Size of the file or of each device in bytes; `None`: the whole device.
    pub bytes: Option<u64>,
    /// Bytes that stay available on the file system of the file; `None`: the agent's default.
    pub reserve_bytes: Option<u64>,
    /// Desired I/O engine of its devices.
    pub engine: Engine,
    /// Engine to use if the desired one is not available.
    pub fallback: FallbackEngine,
    /// Policy for devices with foreign data.
    pub foreign: ForeignSignatures,
    /// Limit of the p99 read latency over a minute.
    pub max_read_latency: Option<Duration>,
    /// Limit of media errors of a device.
    pub max_media_errors: Option<u32>,
    /// Minimum remaining spare capacity of a device, in percent.
    pub min_spare_percent: Option<u8>,
    /// Whether to keep or destroy the data.
    pub data: DataPolicy,
}

/// Whether to keep or destroy the data of a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataPolicy {
    /// Keep and use the data.
    Keep,
    /// Destroy the data, as confirmed in the pool.
    Wipe,
}

/// Where blocks are stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// On block devices or NVMe controllers whose stable names match.
    Devices {
        /// Path patterns of the devices.
        globs: Vec<String>,
        /// Maximum number of devices to use.
        most: usize,
    },
    /// In a file, which is created if it is missing.
    File(PathBuf),
}

/// An invalid part of the spec.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpecError {
    /// The pool of the affected claim; `None` in a claim: any pool may be affected.
    pub pool: Option<String>,
    /// The affected part of the spec.
    pub part: SpecPart,
    /// Field, value and accepted values.
    pub message: String,
}

/// The part of a spec that an error affects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpecPart {
    /// A claim: its pool keeps its state on the node.
    Claim,
    /// Any other part of the spec.
    Other,
}

impl Desired {
    /// Parses the spec of a `CacheNode`. Invalid parts become [`SpecError`]s.
    pub fn read(generation: i64, spec: &Value) -> Desired {
        let mut problems = Vec::new();
        let mut other =
            |message: String| problems.push(SpecError { pool: None, part: SpecPart::Other, message });
        let mode = match &spec["mode"] {
            Value::Null => Some(NodeMode::default()),
            value => serde_json::from_value(value.clone())
                .map_err(|error| other(format!("spec.mode: {error}; keeping the previous mode")))
                .ok(),
        };
        let failure_domain = read_failure_domain(&spec["failureDomain"])
            .map_err(|error| other(format!("spec.failureDomain: {error}; keeping the previous one")))
            .ok();
        let configuration_digest = match &spec["configurationDigest"] {
            Value::Null => None,
            Value::String(digest) => Some(digest.clone()),
            value => {
                other(format!("spec.configurationDigest: invalid value {value}: expected a string"));
                None
            }
        };
        let profiles = read_profiles(&spec["profiles"])
            .map_err(|error| other(format!("spec.profiles: {error}; keeping the previous profiles")))
            .ok();
        let queues = read_queues(&spec["queues"])
            .map_err(|error| {
                other(format!("spec.queues: {error}; keeping the previous reservations for GPUs"));
            })
            .ok();
        let mut claims = Vec::new();
        match &spec["claims"] {
            Value::Null => {}
            Value::Array(items) => {
                for item in items.iter().take(CLAIMS_MAX) {
                    match read_claim(item) {
                        Ok(claim) => claims.push(claim),
                        Err(problem) => problems.push(problem),
                    }
                }
                if items.len() > CLAIMS_MAX {
                    problems.push(unreadable(&Value::Null, &format!("more than {CLAIMS_MAX} claims")));
                }
            }
            value => {
                problems.push(unreadable(&Value::Null, &format!("invalid value {value}: expected a list")));
            }
        }
        Desired {
            sequence: 0,
            generation,
            mode,
            failure_domain,
            configuration_digest,
            claims,
            profiles,
            queues,
            problems,
        }
    }

    /// Removes everything that must not be applied without confirmation by the API server: destruction of
    /// data, which may have been revoked, and queue grants, which may belong to another allocation by now.
    #[must_use]
    pub fn without_destruction(mut self) -> Desired {
        self.queues = None;
        self.claims.retain(|claim| claim.data == DataPolicy::Keep);
        self.claims.iter_mut().for_each(|claim| claim.foreign = ForeignSignatures::Refuse);
        self
    }

    /// Returns whether the claim of a pool may be present but invalid: the pool then keeps its state.
    pub fn is_unreadable(&self, pool: &str) -> bool {
        let speaks_of = |problem: &SpecError| problem.pool.as_deref().is_none_or(|named| named == pool);
        self.problems.iter().any(|problem| problem.part == SpecPart::Claim && speaks_of(problem))
    }
}

fn read_failure_domain(value: &Value) -> Result<String, String> {
    if value.is_null() {
        return Ok(String::new());
    }
    let is_valid = |text: &str| {
        let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        let is_edge = |c: char| matches!(c, '-' | '_' | '.');
        text.len() <= FAILURE_DOMAIN_BYTES_MAX
            && text.chars().all(fits)
            && !text.starts_with(is_edge)
            && !text.ends_with(is_edge)
    };
    value
        .as_str()
        .filter(|text| is_valid(text))
        .map(str::to_owned)
        .ok_or_else(|| format!("invalid value {value}: expected the value of a node label"))
}

fn read_profiles(value: &Value) -> Result<Vec<DesiredProfile>, String> {
    if value.is_null() {
        return Ok(Vec::new());
    }
    let claims: Vec<ProfileClaim> =
        serde_json::from_value(value.clone()).map_err(|error| error.to_string())?;
    if claims.len() > PROFILES_MAX {
        return Err(format!("more than {PROFILES_MAX} profiles"));
    }
    let profile = |claim: &ProfileClaim| {
        let (name, digest) = (claim.name.to_string(), claim.digest.to_string());
        // The digest becomes part of a file name, so it must not contain anything else.
        match content_file(&digest) {
            Some(file) => Ok(DesiredProfile { name, digest, file }),
            None => Err(format!("{name}: invalid digest '{digest}'")),
        }
    };
    claims.iter().map(profile).collect()
}

fn read_queues(value: &Value) -> Result<Vec<DesiredQueues>, String> {
    if value.is_null() {
        return Ok(Vec::new());
    }
    let claims: Vec<QueueClaim> = serde_json::from_value(value.clone()).map_err(|error| error.to_string())?;
    if claims.len() > QUEUES_MAX {
        return Err(format!("more than {QUEUES_MAX} allocations"));
    }
    claims.into_iter().map(desired_queues).collect()
}

fn desired_queues(claim: QueueClaim) -> Result<DesiredQueues, String> {
    let memory_bytes = claim.registered_memory.as_ref().map(Quantity::bytes).transpose();
    Ok(DesiredQueues {
        uid: claim.uid.to_string(),
        allocation: claim.allocation.to_string(),
        exclusive: claim.isolation == QueueIsolation::ExclusiveController,
        depth: claim.depth,
        memory_bytes: memory_bytes.map_err(|error| format!("registeredMemory: {error}"))?,
        slack_profile: claim.slack_profile.map(|name| name.to_string()),
        pairs: claim.controllers.iter().map(|share| (share.serial.to_string(), share.queue_pairs)).collect(),
    })
}

fn unreadable(claim: &Value, why: &str) -> SpecError {
    let pool = claim["pool"].as_str().map(str::to_owned);
    let at = pool.as_deref().unwrap_or("unknown pool");
    let message = format!("spec.claims[{at}]: {why}; keeping the pool's devices on this node as they are");
    SpecError { pool, part: SpecPart::Claim, message }
}

fn read_claim(item: &Value) -> Result<Claim, SpecError> {
    let refused = |why: &str| unreadable(item, why);
    let claim: PoolClaim =
        serde_json::from_value(item.clone()).map_err(|error| refused(&error.to_string()))?;
    let bytes = claim.size.as_ref().map(Quantity::bytes).transpose();
    let bytes = bytes.map_err(|error| refused(&format!("size: {error}")))?;
    let reserve_bytes = claim.reserve.as_ref().map(Quantity::bytes).transpose();
    let reserve_bytes = reserve_bytes.map_err(|error| refused(&format!("reserve: {error}")))?;
    let max_read_latency = claim.max_read_latency.as_ref().map(Span::duration).transpose();
    let max_read_latency = max_read_latency.map_err(|error| refused(&format!("maxReadLatency: {error}")))?;
    let source = match (claim.file, claim.globs.as_slice()) {
        (Some(file), []) => Source::File(PathBuf::from(file.to_string())),
        (None, globs @ [_, ..]) => Source::Devices {
            globs: globs.iter().map(ToString::to_string).collect(),
            most: claim.max_devices as usize,
        },
        _ => return Err(refused("exactly one of globs and file must be set")),
    };
    if matches!(source, Source::File(_)) && bytes.is_none() {
        return Err(refused("size: required for a file"));
    }
    if matches!(source, Source::Devices { .. }) && reserve_bytes.is_some() {
        return Err(refused("reserve: expected with a file only, as devices have no file system"));
    }
    Ok(Claim {
        pool: claim.pool.to_string(),
        uid: claim.uid.to_string(),
        generation: claim.generation,
        source,
        serials: claim.serials.iter().map(ToString::to_string).collect(),
        namespace: claim.namespace_id,
        bytes,
        reserve_bytes,
        engine: claim.engine,
        fallback: claim.fallback_engine,
        foreign: claim.foreign_signatures,
        max_read_latency,
        max_media_errors: claim.max_media_errors,
        min_spare_percent: claim.min_spare_percent.map(|percent| percent.0),
        data: if claim.wipe { DataPolicy::Wipe } else { DataPolicy::Keep },
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn file_claim() -> Value {
        json!({ "pool": "fast", "uid": "u-1", "generation": 3, "file": "/var/lib/reprise/pool", "size": "64Mi" })
    }

    fn read(spec: &Value) -> Desired {
        Desired::read(7, spec)
    }

    #[test]
    fn spec_is_parsed_with_its_defaults() {
        let desired = read(&json!({ "nodeName": "n", "claims": [file_claim()], "mode": "Draining" }));
        assert_eq!(
            (desired.generation, desired.mode, desired.problems.len()),
            (7, Some(NodeMode::Draining), 0)
        );
        let claim = &desired.claims[0];
        assert_eq!(claim.source, Source::File(PathBuf::from("/var/lib/reprise/pool")));
        assert_eq!(
            (claim.bytes, claim.engine, claim.data),
            (Some(64 << 20), Engine::IoUring, DataPolicy::Keep)
        );
        assert_eq!(claim.max_read_latency, None);
        assert_eq!((claim.max_media_errors, claim.min_spare_percent), (None, None));
        assert_eq!(claim.reserve_bytes, None);
        let mut quick = file_claim();
        (quick["maxReadLatency"], quick["reserve"]) = (json!("50ms"), json!("2Gi"));
        (quick["maxMediaErrors"], quick["minSparePercent"]) = (json!(0), json!(10));
        let desired = read(&json!({ "claims": [quick] }));
        assert_eq!(desired.claims[0].max_read_latency, Some(Duration::from_millis(50)));
        let worn = (desired.claims[0].max_media_errors, desired.claims[0].min_spare_percent);
        assert_eq!(worn, (Some(0), Some(10)));
        assert_eq!(desired.claims[0].reserve_bytes, Some(2 << 30));
        assert_eq!(read(&json!({})).mode, Some(NodeMode::Active));
        assert_eq!(read(&json!({ "failureDomain": "zone-a" })).failure_domain.as_deref(), Some("zone-a"));
        assert_eq!(read(&json!({})).failure_domain.as_deref(), Some(""), "unknown without the label");
        let devices = json!({ "pool": "raw", "uid": "u", "generation": 1, "globs": ["/dev/disk/by-id/nvme-*"], "wipe": true });
        let desired = read(&json!({ "claims": [devices] }));
        let globs = vec!["/dev/disk/by-id/nvme-*".to_owned()];
        assert_eq!(desired.claims[0].source, Source::Devices { globs, most: 32 });
        assert_eq!(desired.claims[0].data, DataPolicy::Wipe);
    }

    #[test]
    fn unknown_fields_are_ignored() {
        let mut claim = file_claim();
        claim["colour"] = json!("red");
        let desired = read(&json!({ "claims": [claim], "moon": { "phase": 3 } }));
        assert_eq!((desired.claims.len(), desired.problems.len()), (1, 0));
    }

    #[test]
    fn invalid_value_affects_only_its_part() {
        let with = |field: &str, value: Value| {
            let mut claim = file_claim();
            claim["pool"] = json!("odd");
            claim[field] = value;
            json!({ "claims": [claim, file_claim()] })
        };
        for (spec, words) in [
            (with("engine", json!("Telepathy")), "Telepathy"),
            (with("size", json!("many")), "many"),
            (with("generation", json!("x")), "expected i64"),
            (with("globs", json!(["/dev/disk/by-id/x"])), "exactly one"),
            (with("size", Value::Null), "required for a file"),
            (with("file", json!(17)), "17"),
            (with("reserve", json!("a lot")), "reserve"),
            (with("maxReadLatency", json!("soon")), "maxReadLatency"),
        ] {
            let desired = read(&spec);
            assert_eq!(desired.claims.len(), 1, "the other claim is applied: {spec}");
            let [problem] = &desired.problems[..] else {
                panic!("expected one problem: {:?}", desired.problems)
            };
            assert!(
                problem.message.contains(words) && problem.message.contains("odd"),
                "{}",
                problem.message
            );
            assert!(desired.is_unreadable("odd") && !desired.is_unreadable("fast"));
        }
        let desired = read(
            &json!({ "mode": "Asleep", "configurationDigest": 7, "profiles": "none", "failureDomain": "a/b" }),
        );
        assert_eq!((desired.mode, desired.problems.len()), (None, 4));
        assert_eq!(desired.failure_domain, None, "the previous domain is kept");
        assert!(desired.problems[1].message.contains("spec.failureDomain: invalid value \"a/b\""));
        assert_eq!(desired.profiles, None, "the previous profiles are kept");
        assert!(!desired.is_unreadable("fast"), "no claim is affected");
    }

    #[test]
    fn rejects_a_reserve_of_devices() {
        let devices = json!({ "pool": "raw", "uid": "u", "generation": 1, "globs": ["/dev/disk/by-id/x"], "reserve": "1Gi" });
        let desired = read(&json!({ "claims": [devices] }));
        assert_eq!((desired.claims.len(), desired.problems.len()), (0, 1));
        assert!(desired.problems[0].message.contains("reserve: expected with a file only"));
    }

    #[test]
    fn profiles_are_parsed_with_their_files_and_invalid_digests_are_rejected() {
        let digest = format!("sha256:{}", "0f".repeat(32));
        let claim = |digest: &str| json!({ "name": "llama", "digest": digest });
        let desired = read(&json!({ "profiles": [claim(&digest)] }));
        let profile = DesiredProfile {
            name: "llama".to_owned(),
            file: format!("profile-{}.json", "0f".repeat(32)),
            digest: digest.clone(),
        };
        assert_eq!((desired.profiles, desired.problems.len()), (Some(vec![profile]), 0));
        assert_eq!(read(&json!({})).profiles, Some(Vec::new()));
        for (profiles, words) in [
            (json!([claim(&digest), claim("sha256:../../etc/passwd")]), "invalid digest"),
            (json!(vec![claim(&digest); 17]), "more than 16"),
            (json!([{ "name": "llama" }]), "missing field `digest`"),
        ] {
            let desired = read(&json!({ "profiles": profiles }));
            assert_eq!(desired.profiles, None, "{profiles}");
            assert!(desired.problems[0].message.contains(words), "{:?}", desired.problems);
        }
    }

    #[test]
    fn queue_pairs_are_parsed_by_controller_and_dropped_without_confirmation() {
        let share = |serial: &str, pairs: u32| json!({ "serial": serial, "queuePairs": pairs });
        let claim =
            json!({ "uid": "u-1", "allocation": "chat/x", "controllers": [share("S1", 8), share("S2", 4)] });
        let mut own = claim.clone();
        (own["isolation"], own["depth"]) = (json!("ExclusiveController"), json!(64));
        (own["registeredMemory"], own["slackProfile"]) = (json!("3Gi"), json!("llama"));
        let mut odd = own.clone();
        odd["registeredMemory"] = json!("3GiB");
        let desired = read(&json!({ "queues": [claim, own] }));
        let [shared, own] = desired.queues.as_deref().expect("the grants are valid") else {
            panic!("{desired:?}")
        };
        let pairs = BTreeMap::from([("S1".to_owned(), 8), ("S2".to_owned(), 4)]);
        assert_eq!((shared.allocation.as_str(), shared.exclusive, &shared.pairs), ("chat/x", false, &pairs));
        assert_eq!((shared.depth, own.depth), (1024, 64));
        assert!(own.exclusive);
        assert_eq!((own.memory_bytes, own.slack_profile.as_deref()), (Some(3 << 30), Some("llama")));
        assert_eq!((shared.memory_bytes, shared.slack_profile.as_deref()), (None, None));
        assert_eq!(read(&json!({})).queues, Some(Vec::new()));
        assert_eq!(desired.without_destruction().queues, None);
        for (queues, words) in [
            (json!([{ "uid": "u-1" }]), "missing field `allocation`"),
            (json!(vec![claim; 129]), "more than 128"),
            (json!([odd]), "registeredMemory"),
        ] {
            let desired = read(&json!({ "queues": queues }));
            assert_eq!(desired.queues, None);
            assert!(desired.problems[0].message.contains(words), "{:?}", desired.problems);
        }
    }

    #[test]
    fn invalid_claims_keep_all_pools_as_they_are() {
        for claims in [json!("x"), json!([17]), json!(vec![file_claim(); 9])] {
            let desired = read(&json!({ "claims": claims }));
            assert!(desired.is_unreadable("any"), "{:?}", desired.problems);
        }
        for spec in [json!(null), json!([]), json!("x"), json!({ "claims": null })] {
            assert!(read(&spec).claims.is_empty());
        }
    }
}
