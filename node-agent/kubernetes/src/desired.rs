//! What is wanted of a node, out of the spec of its `CacheNode`.
//!
//! The object may have been written by an operator of another version, or be damaged on disk: every part is read for itself. A field
//! that nobody knows is passed over; a value that cannot be read is a [`Problem`], which ends as a condition, and what it speaks
//! of stays as it is on the node. Nothing of an object ends the agent.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use reprise_crds::fields::{Engine, FallbackEngine, ForeignSignatures, NodeMode, Quantity, Span};
use reprise_crds::node::{PoolClaim, ProfileClaim, QueueClaim};
use reprise_crds::queues::QueueIsolation;
use reprise_crds::slack::content_file;
use serde_json::Value;

/// Claims of one node, at the most; the schema says so too.
const CLAIMS_MAX: usize = 8;

/// Profiles of one node, at the most; the schema says so too.
const PROFILES_MAX: usize = 16;

/// Grants of queue pairs of one node, at the most; the schema says so too.
const QUEUES_MAX: usize = 128;

/// What is wanted of a node.
#[derive(Clone, Debug, PartialEq)]
pub struct Desired {
    /// Which telling this is, of all of one process; 0: none.
    pub told: u64,
    /// Generation of the spec.
    pub generation: i64,
    /// What the node is used for; `None` when that cannot be read: as before.
    pub mode: Option<NodeMode>,
    /// Digest of the configuration file that the agent should run by.
    pub configuration_digest: Option<String>,
    /// What is to be opened.
    pub claims: Vec<Claim>,
    /// Profiles that the agent should work by; `None` when they cannot be read: as before.
    pub profiles: Option<Vec<ProfileWish>>,
    /// Queue pairs that are granted; `None` when they cannot be read, or are not the API server's word: as before.
    pub queues: Option<Vec<QueueWish>>,
    /// What cannot be read.
    pub problems: Vec<Problem>,
}

/// A profile that the agent should work by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProfileWish {
    /// Its name.
    pub name: String,
    /// Digest of the wanted revision.
    pub digest: String,
    /// Name of the file with its content, beside the configuration.
    pub file: String,
}

/// Queue pairs that are granted to a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueueWish {
    /// Unique id of the allocation.
    pub uid: String,
    /// Its namespace and name.
    pub allocation: String,
    /// Whether nobody else may have anything of the controllers.
    pub exclusive: bool,
    /// Queue pairs by the controllers' serial numbers.
    pub pairs: BTreeMap<String, u32>,
}

/// What one pool wants of the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claim {
    /// The pool.
    pub pool: String,
    /// Its unique id.
    pub uid: String,
    /// Generation of the pool's spec.
    pub generation: i64,
    /// Where blocks are to lie.
    pub source: Source,
    /// Bytes of the file or of each device; `None`: all of a device.
    pub bytes: Option<u64>,
    /// How devices are driven.
    pub engine: Engine,
    /// What happens where the engine cannot be had.
    pub fallback: FallbackEngine,
    /// What happens to devices with somebody else's data.
    pub foreign: ForeignSignatures,
    /// Longest time that 99 of 100 reads of a minute may take.
    pub max_read_latency: Option<Duration>,
    /// Media errors that a device may have.
    pub max_media_errors: Option<u32>,
    /// Spare capacity, in percent, that a device must have left.
    pub min_spare_percent: Option<u8>,
    /// What becomes of the data.
    pub data: Data,
}

/// What becomes of the data of a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Data {
    /// It is used.
    Kept,
    /// It is destroyed, as was confirmed.
    Wiped,
}

/// Where blocks are to lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// On devices with such stable names.
    Devices {
        /// Patterns of their paths.
        globs: Vec<String>,
        /// Devices to take, at the most.
        most: usize,
    },
    /// In a file, made when it is not there.
    File(PathBuf),
}

/// Something that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The pool whose claim it is in; `None` in a claim: any of them.
    pub pool: Option<String>,
    /// Whether it is in a claim.
    pub part: Part,
    /// Field, value and what is allowed.
    pub message: String,
}

/// What a problem is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// A claim: its pool stays as it is.
    Claim,
    /// Something else.
    Other,
}

impl Desired {
    /// Reads a spec.
    pub fn read(generation: i64, spec: &Value) -> Desired {
        let mut problems = Vec::new();
        let mut other = |message: String| problems.push(Problem { pool: None, part: Part::Other, message });
        let mode = match &spec["mode"] {
            Value::Null => Some(NodeMode::default()),
            value => serde_json::from_value(value.clone())
                .map_err(|error| other(format!("spec.mode: {error}; the mode stays as it was")))
                .ok(),
        };
        let configuration_digest = match &spec["configurationDigest"] {
            Value::Null => None,
            Value::String(digest) => Some(digest.clone()),
            value => {
                other(format!("spec.configurationDigest: {value} is no text"));
                None
            }
        };
        let profiles = read_profiles(&spec["profiles"])
            .map_err(|error| other(format!("spec.profiles: {error}; profiles stay as they were")))
            .ok();
        let queues = read_queues(&spec["queues"])
            .map_err(|error| other(format!("spec.queues: {error}; what is kept for GPUs stays as it was")))
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
            value => problems.push(unreadable(&Value::Null, &format!("{value} is no list"))),
        }
        Desired { told: 0, generation, mode, configuration_digest, claims, profiles, queues, problems }
    }

    /// The same as far as it is followed without the API server's word: nothing is destroyed that somebody may have thought better of
    /// since, and no queue pairs are taken that may be somebody else's by now.
    #[must_use]
    pub fn without_destruction(mut self) -> Desired {
        self.queues = None;
        self.claims.retain(|claim| claim.data == Data::Kept);
        self.claims.iter_mut().for_each(|claim| claim.foreign = ForeignSignatures::Refuse);
        self
    }

    /// Whether the claim of a pool is there and cannot be read: what the pool has stays as it is.
    pub fn is_unreadable(&self, pool: &str) -> bool {
        let speaks_of = |problem: &Problem| problem.pool.as_deref().is_none_or(|named| named == pool);
        self.problems.iter().any(|problem| problem.part == Part::Claim && speaks_of(problem))
    }
}

fn read_profiles(value: &Value) -> Result<Vec<ProfileWish>, String> {
    if value.is_null() {
        return Ok(Vec::new());
    }
    let claims: Vec<ProfileClaim> =
        serde_json::from_value(value.clone()).map_err(|error| error.to_string())?;
    if claims.len() > PROFILES_MAX {
        return Err(format!("more than {PROFILES_MAX} profiles"));
    }
    let wish = |claim: &ProfileClaim| {
        let (name, digest) = (claim.name.to_string(), claim.digest.to_string());
        // A file is named by it, so it is nothing but a digest.
        match content_file(&digest) {
            Some(file) => Ok(ProfileWish { name, digest, file }),
            None => Err(format!("{name}: '{digest}' is no digest")),
        }
    };
    claims.iter().map(wish).collect()
}

fn read_queues(value: &Value) -> Result<Vec<QueueWish>, String> {
    if value.is_null() {
        return Ok(Vec::new());
    }
    let claims: Vec<QueueClaim> = serde_json::from_value(value.clone()).map_err(|error| error.to_string())?;
    if claims.len() > QUEUES_MAX {
        return Err(format!("more than {QUEUES_MAX} allocations"));
    }
    let wish = |claim: QueueClaim| QueueWish {
        uid: claim.uid.to_string(),
        allocation: claim.allocation.to_string(),
        exclusive: claim.isolation == QueueIsolation::ExclusiveController,
        pairs: claim.controllers.iter().map(|share| (share.serial.to_string(), share.queue_pairs)).collect(),
    };
    Ok(claims.into_iter().map(wish).collect())
}

fn unreadable(claim: &Value, why: &str) -> Problem {
    let pool = claim["pool"].as_str().map(str::to_owned);
    let at = pool.as_deref().unwrap_or("without a pool");
    let message = format!("spec.claims[{at}]: {why}; what this pool has on the node stays as it is");
    Problem { pool, part: Part::Claim, message }
}

fn read_claim(item: &Value) -> Result<Claim, Problem> {
    let refused = |why: &str| unreadable(item, why);
    let claim: PoolClaim =
        serde_json::from_value(item.clone()).map_err(|error| refused(&error.to_string()))?;
    let bytes = claim.size.as_ref().map(Quantity::bytes).transpose();
    let bytes = bytes.map_err(|error| refused(&format!("size: {error}")))?;
    let max_read_latency = claim.max_read_latency.as_ref().map(Span::duration).transpose();
    let max_read_latency = max_read_latency.map_err(|error| refused(&format!("maxReadLatency: {error}")))?;
    let source = match (claim.file, claim.globs.as_slice()) {
        (Some(file), []) => Source::File(PathBuf::from(file.to_string())),
        (None, globs @ [_, ..]) => Source::Devices {
            globs: globs.iter().map(ToString::to_string).collect(),
            most: claim.max_devices as usize,
        },
        _ => return Err(refused("exactly one of globs and file is to be set")),
    };
    if matches!(source, Source::File(_)) && bytes.is_none() {
        return Err(refused("size: a file needs one"));
    }
    Ok(Claim {
        pool: claim.pool.to_string(),
        uid: claim.uid.to_string(),
        generation: claim.generation,
        source,
        bytes,
        engine: claim.engine,
        fallback: claim.fallback_engine,
        foreign: claim.foreign_signatures,
        max_read_latency,
        max_media_errors: claim.max_media_errors,
        min_spare_percent: claim.min_spare_percent.map(|percent| percent.0),
        data: if claim.wipe { Data::Wiped } else { Data::Kept },
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
    fn a_spec_is_read_with_its_defaults() {
        let desired = read(&json!({ "nodeName": "n", "claims": [file_claim()], "mode": "Draining" }));
        assert_eq!(
            (desired.generation, desired.mode, desired.problems.len()),
            (7, Some(NodeMode::Draining), 0)
        );
        let claim = &desired.claims[0];
        assert_eq!(claim.source, Source::File(PathBuf::from("/var/lib/reprise/pool")));
        assert_eq!((claim.bytes, claim.engine, claim.data), (Some(64 << 20), Engine::IoUring, Data::Kept));
        assert_eq!(claim.max_read_latency, None);
        assert_eq!((claim.max_media_errors, claim.min_spare_percent), (None, None));
        let mut quick = file_claim();
        quick["maxReadLatency"] = json!("50ms");
        (quick["maxMediaErrors"], quick["minSparePercent"]) = (json!(0), json!(10));
        let desired = read(&json!({ "claims": [quick] }));
        assert_eq!(desired.claims[0].max_read_latency, Some(Duration::from_millis(50)));
        let worn = (desired.claims[0].max_media_errors, desired.claims[0].min_spare_percent);
        assert_eq!(worn, (Some(0), Some(10)));
        assert_eq!(read(&json!({})).mode, Some(NodeMode::Active));
        let devices = json!({ "pool": "raw", "uid": "u", "generation": 1, "globs": ["/dev/disk/by-id/nvme-*"], "wipe": true });
        let desired = read(&json!({ "claims": [devices] }));
        let globs = vec!["/dev/disk/by-id/nvme-*".to_owned()];
        assert_eq!(desired.claims[0].source, Source::Devices { globs, most: 32 });
        assert_eq!(desired.claims[0].data, Data::Wiped);
    }

    #[test]
    fn fields_that_nobody_knows_are_passed_over() {
        let mut claim = file_claim();
        claim["colour"] = json!("red");
        let desired = read(&json!({ "claims": [claim], "moon": { "phase": 3 } }));
        assert_eq!((desired.claims.len(), desired.problems.len()), (1, 0));
    }

    #[test]
    fn what_cannot_be_read_is_a_problem_of_its_part_alone() {
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
            (with("size", Value::Null), "a file needs one"),
            (with("file", json!(17)), "17"),
            (with("maxReadLatency", json!("soon")), "maxReadLatency"),
        ] {
            let desired = read(&spec);
            assert_eq!(desired.claims.len(), 1, "the other claim is followed: {spec}");
            let [problem] = &desired.problems[..] else { panic!("one problem: {:?}", desired.problems) };
            assert!(
                problem.message.contains(words) && problem.message.contains("odd"),
                "{}",
                problem.message
            );
            assert!(desired.is_unreadable("odd") && !desired.is_unreadable("fast"));
        }
        let desired = read(&json!({ "mode": "Asleep", "configurationDigest": 7, "profiles": "none" }));
        assert_eq!((desired.mode, desired.problems.len()), (None, 3));
        assert_eq!(desired.profiles, None, "they stay as they were");
        assert!(!desired.is_unreadable("fast"), "no claim is meant");
    }

    #[test]
    fn profiles_are_read_with_their_files_and_a_digest_that_is_none_names_no_file() {
        let digest = format!("sha256:{}", "0f".repeat(32));
        let claim = |digest: &str| json!({ "name": "llama", "digest": digest });
        let desired = read(&json!({ "profiles": [claim(&digest)] }));
        let wish = ProfileWish {
            name: "llama".to_owned(),
            file: format!("profile-{}.json", "0f".repeat(32)),
            digest: digest.clone(),
        };
        assert_eq!((desired.profiles, desired.problems.len()), (Some(vec![wish]), 0));
        assert_eq!(read(&json!({})).profiles, Some(Vec::new()));
        for (profiles, words) in [
            (json!([claim(&digest), claim("sha256:../../etc/passwd")]), "is no digest"),
            (json!(vec![claim(&digest); 17]), "more than 16"),
            (json!([{ "name": "llama" }]), "missing field `digest`"),
        ] {
            let desired = read(&json!({ "profiles": profiles }));
            assert_eq!(desired.profiles, None, "{profiles}");
            assert!(desired.problems[0].message.contains(words), "{:?}", desired.problems);
        }
    }

    #[test]
    fn queue_pairs_are_read_by_controller_and_none_without_the_servers_word() {
        let share = |serial: &str, pairs: u32| json!({ "serial": serial, "queuePairs": pairs });
        let claim =
            json!({ "uid": "u-1", "allocation": "chat/x", "controllers": [share("S1", 8), share("S2", 4)] });
        let mut own = claim.clone();
        own["isolation"] = json!("ExclusiveController");
        let desired = read(&json!({ "queues": [claim, own] }));
        let [shared, own] = desired.queues.as_deref().expect("they are right") else { panic!("{desired:?}") };
        let pairs = BTreeMap::from([("S1".to_owned(), 8), ("S2".to_owned(), 4)]);
        assert_eq!((shared.allocation.as_str(), shared.exclusive, &shared.pairs), ("chat/x", false, &pairs));
        assert!(own.exclusive);
        assert_eq!(read(&json!({})).queues, Some(Vec::new()));
        assert_eq!(desired.without_destruction().queues, None);
        for (queues, words) in [
            (json!([{ "uid": "u-1" }]), "missing field `allocation`"),
            (json!(vec![claim; 129]), "more than 128"),
        ] {
            let desired = read(&json!({ "queues": queues }));
            assert_eq!(desired.queues, None);
            assert!(desired.problems[0].message.contains(words), "{:?}", desired.problems);
        }
    }

    #[test]
    fn claims_that_are_no_list_leave_everything_as_it_is() {
        for claims in [json!("x"), json!([17]), json!(vec![file_claim(); 9])] {
            let desired = read(&json!({ "claims": claims }));
            assert!(desired.is_unreadable("any"), "{:?}", desired.problems);
        }
        for spec in [json!(null), json!([]), json!("x"), json!({ "claims": null })] {
            assert!(read(&spec).claims.is_empty());
        }
    }
}
