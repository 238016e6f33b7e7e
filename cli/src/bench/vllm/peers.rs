//! Other caches for vLLM, each measured as its makers describe its use on one host: engine, prompts and order of prompts are
//! those of our own measurement. What needs a network has one of its own, a namespace with nothing outside.
//!
//! Legs follow the saves in the order of ours, at once: memory, files, and files after engine and store were started anew. A cache
//! that keeps both has both from the start, as ours has; reads of devices say whether loads from memory were that.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow};
use serde_json::{Value, json};

use super::super::companion::{Companion, Script};
use super::super::resident::{self, Held};
use super::disk;
use super::engine::{Answer, Engine, Surroundings};
use super::samples::{Leg, Samples, System};
use super::{Peer, WARM_UP, World};

/// Where Mooncake's processes find each other; it refuses loopback.
const ADDRESS: &str = "10.77.0.1";
const MASTER_PORT: u16 = 50051;
const LMCACHE_PORT: u16 = 5555;
pub(super) const LMCACHE_HTTP_PORT: u16 = 5556;

/// Memory through which Mooncake's client copies: two prompts.
const MOONCAKE_BUFFER_BYTES: u64 = 256 << 20;

/// The namespace's loopback, and an address of its own on one end of a pair.
const NETWORK: &str = r"
ip link set lo up
ip link add reprise0 type veth peer name reprise1
ip address add $ADDRESS/24 dev reprise0
ip link set reprise0 up
ip link set reprise1 up
listens() { until (: > /dev/tcp/$1/$2) 2> /dev/null; do kill -0 $!; sleep 0.05; done; }
";

const MOONCAKE: &str = r"
package=$($PYTHON -c 'import mooncake, os; print(os.path.dirname(mooncake.__file__))')
$package/mooncake_master --rpc_address=$ADDRESS --rpc_port=$MASTER_PORT --metrics_host=$ADDRESS --metrics_port=50052 --logtostderr &
listens $ADDRESS $MASTER_PORT
if [ $OWNER_BYTES -gt 0 ]; then
    $package/mooncake_client --host=$ADDRESS --port=50053 --global_segment_size=$OWNER_BYTES --protocol=tcp \
        --master_server_address=$ADDRESS:$MASTER_PORT --metadata_server=P2PHANDSHAKE &
    listens $ADDRESS 50053
fi
";

const LMCACHE: &str = r#"
${PYTHON%/*}/lmcache server --host 127.0.0.1 --port $LMCACHE_PORT --l1-size-gb $GIB --l1-init-size-gb $GIB --eviction-policy LRU \
    --shm-name reprise-bench-$$ --supported-transfer-mode engine_driven --http-port $LMCACHE_HTTP_PORT \
    --l2-adapter "$LMCACHE_FILES" &
listens 127.0.0.1 $LMCACHE_PORT
"#;

/// A peer's engine and what is beside it, as they are started.
struct Setting {
    script: Option<String>,
    variables: Vec<(&'static str, String)>,
    /// Of the engine alone.
    engine_variables: Vec<(&'static str, String)>,
    transfer: Value,
}

/// A peer's engine and what is beside it, which ends after it.
pub(super) struct Running {
    pub(super) engine: Engine,
    pub(super) companion: Option<Companion>,
    /// Of the peer's environment.
    pub(super) python: PathBuf,
}

/// Measures a peer with a fresh engine and a fresh store.
pub(super) fn measure(
    system: System,
    peer: Peer,
    world: &World,
    samples: &mut Samples,
) -> anyhow::Result<()> {
    let python = world.environments.python_of(peer).map_err(|why| anyhow!("{why}"))?;
    let files = world.peer_files();
    remove_folder(&files)?;
    fs::create_dir_all(&files).with_context(|| format!("cannot create {}", files.display()))?;
    samples.started(system, 1);
    let mut running = start(system, python, world)?;
    resident::begin_peaks(&running.pids())?;
    let seeds = world.seeds();
    let cold = save(&mut running.engine, world)?;
    samples.answered((system, Leg::Cold), &seeds, &cold, 0.0);
    if system.lacks(Leg::Nvme).is_none() {
        disk::written(world)?;
    }
    hits_in_memory(system, &mut running, world, samples)?;
    samples.held(system, Held::by(&running.pids())?);
    if system.lacks(Leg::Nvme).is_none() {
        disk::nvme(system, &mut running, world, samples)?;
    }
    drop(running);
    if system.lacks(Leg::Restart).is_none() {
        samples.started(system, 1);
        disk::restart(system, &mut start(system, python, world)?, world, samples)?;
    }
    remove_folder(&files)
}

/// Loads with everything where it was put; a prompt that was read from a device instead is not found.
fn hits_in_memory(
    system: System,
    running: &mut Running,
    world: &World,
    samples: &mut Samples,
) -> anyhow::Result<()> {
    let (seeds, sizes) = (world.seeds(), world.sizes);
    let before = resident::device_read_bytes(&running.pids())?;
    let hits = running.engine.measure(&seeds, sizes.tokens())?;
    let read = resident::device_read_bytes(&running.pids())?.saturating_sub(before);
    // Whole ones: a page of a library is read now and then.
    let from_device = (read / sizes.prompt_bytes()) as f64 / seeds.len() as f64;
    let found = (found(&hits, sizes.cached_tokens) - from_device).max(0.0);
    samples.answered((system, Leg::Hit), &seeds, &hits, found);
    Ok(())
}

/// Puts the prompts of the measurement into a cache, as far as it takes them, each until it is found there; the answers are those
/// to prompts that are nowhere.
pub(super) fn save(engine: &mut Engine, world: &World) -> anyhow::Result<Vec<Answer>> {
    let sizes = world.sizes;
    let mut cold = Vec::new();
    for seed in world.seeds() {
        cold.extend(engine.measure(&[seed], sizes.tokens())?);
        engine.settle(&[seed], sizes.tokens(), sizes.cached_tokens)?;
    }
    Ok(cold)
}

impl Running {
    /// Processes that have started all others of engine and store.
    fn pids(&self) -> Vec<u32> {
        self.companion.iter().map(Companion::pid).chain([self.engine.pid()]).collect()
    }
}

/// Starts and warms up.
fn start(system: System, python: &Path, world: &World) -> anyhow::Result<Running> {
    let setting = setting(system, python, world)?;
    let companion = setting
        .script
        .as_ref()
        .map(|text| {
            let script = Script {
                text,
                variables: setting.variables.clone(),
                own_network: true,
                folder: &world.folder,
                name: system.name(),
            };
            Companion::start(&script)
        })
        .transpose()?;
    let surroundings = Surroundings {
        python: python.to_owned(),
        variables: setting.engine_variables.clone(),
        network_of: companion.as_ref().map(Companion::pid),
        ..world.surroundings(system.name())
    };
    let mut engine = Engine::start(&surroundings, &world.first_line(Some(&setting.transfer)))?;
    warm_up(&mut engine, world)?;
    Ok(Running { engine, companion, python: python.to_owned() })
}

/// Everything is used once before it counts: a save, and the load that shows that it has ended.
pub(super) fn warm_up(engine: &mut Engine, world: &World) -> anyhow::Result<()> {
    let (tokens, cached) = (world.sizes.tokens(), world.sizes.cached_tokens);
    engine.measure(&[WARM_UP], tokens)?;
    engine.settle(&[WARM_UP], tokens, cached)
}

/// The share of the tokens that were not computed, of those that need not be.
pub(super) fn found(answers: &[Answer], cached: u64) -> f64 {
    let tokens: u64 = answers.iter().map(|answer| answer.cached.min(cached)).sum();
    tokens as f64 / (cached * answers.len() as u64) as f64
}

fn setting(system: System, python: &Path, world: &World) -> anyhow::Result<Setting> {
    let bytes = world.sizes.store_bytes();
    let files = world.peer_files();
    let variables = vec![
        ("PYTHON", python.to_string_lossy().into_owned()),
        ("ADDRESS", ADDRESS.to_owned()),
        ("MASTER_PORT", MASTER_PORT.to_string()),
        ("LMCACHE_PORT", LMCACHE_PORT.to_string()),
        ("LMCACHE_HTTP_PORT", LMCACHE_HTTP_PORT.to_string()),
        ("LMCACHE_FILES", lmcache_files(&files)),
        ("OWNER_BYTES", if system == System::MooncakeTcp { bytes } else { 0 }.to_string()),
        ("GIB", bytes.div_ceil(1 << 30).to_string()),
    ];
    let connector = |name: &str, extra: Value| json!({ "kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra });
    Ok(match system {
        System::MooncakeSameHost | System::MooncakeTcp => {
            let config = world.folder.join(format!("{}.json", system.name()));
            let embedded = system == System::MooncakeSameHost;
            let text = json!({
                "metadata_server": "P2PHANDSHAKE",
                "master_server_address": format!("{ADDRESS}:{MASTER_PORT}"),
                "protocol": "tcp",
                "device_name": "",
                "mode": if embedded { "embedded" } else { "standalone-store" },
                "global_segment_size": if embedded { bytes } else { 0 },
                "local_buffer_size": MOONCAKE_BUFFER_BYTES,
            });
            fs::write(&config, text.to_string())
                .with_context(|| format!("cannot write {}", config.display()))?;
            Setting {
                script: Some([NETWORK, MOONCAKE].concat()),
                variables,
                engine_variables: vec![
                    ("MOONCAKE_CONFIG_PATH", config.to_string_lossy().into_owned()),
                    ("VLLM_HOST_IP", ADDRESS.to_owned()),
                ],
                transfer: connector("MooncakeStoreConnector", json!({})),
            }
        }
        System::Lmcache => Setting {
            script: Some([NETWORK, LMCACHE].concat()),
            variables,
            engine_variables: vec![("LMCACHE_TRACK_USAGE", "false".to_owned())],
            transfer: connector(
                "LMCacheMPConnector",
                json!({ "lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": LMCACHE_PORT }),
            ),
        },
        System::Example | System::Recompute | System::Reprise => Setting {
            script: None,
            variables,
            engine_variables: Vec::new(),
            transfer: connector("ExampleConnector", json!({ "shared_storage_path": files })),
        },
    })
}

/// LMCache's adapter for files past the page cache, by its own name and settings.
fn lmcache_files(folder: &Path) -> String {
    json!({ "type": "fs_native", "base_path": folder, "use_odirect": true }).to_string()
}

/// Removes what may not be there.
pub(super) fn remove_folder(folder: &Path) -> anyhow::Result<()> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", folder.display()))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_found_is_counted_in_tokens_that_need_not_be_computed() {
        let answer = |cached| Answer { ttft_ms: 1.0, ttlt_ms: 2.0, tokens: Vec::new(), cached };
        assert!((found(&[answer(4096), answer(0)], 4096) - 0.5).abs() < 1e-9);
        assert!((found(&[answer(4097)], 4096) - 1.0).abs() < 1e-9);
    }
}
