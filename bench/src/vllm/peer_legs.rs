//! Other caches for vLLM, each set up on one host as its documentation describes. Engine, prompts and their
//! order are those of Reprise's measurement. Caches that need a network use a separate namespace without
//! other networks.
//!
//! Legs directly follow the saves, in the same order as for Reprise: memory, files, and files after a restart
//! of engine and store. A cache with memory and files uses both from the start, like Reprise; reads of
//! devices show whether loads were from memory.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow};
use serde_json::{Value, json};

use super::disk;
use super::engine::{Answer, Engine, EngineEnvironment};
use super::samples::{Leg, Samples, System};
use super::{BenchContext, Peer, WARM_UP};
use crate::helper_process::{HelperProcess, Script};
use reprise_testkit::bench::process_memory::{self, ProcessMemory};

/// Address of Mooncake's processes, which reject loopback.
const ADDRESS: &str = "10.77.0.1";
const MASTER_PORT: u16 = 50051;
const LMCACHE_PORT: u16 = 5555;
pub(super) const LMCACHE_HTTP_PORT: u16 = 5556;

/// Copy buffer of Mooncake's client: two prompts.
const MOONCAKE_BUFFER_BYTES: u64 = 256 << 20;

/// Sets up the namespace's loopback and an address on one end of a pair.
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

/// Start parameters of a peer's engine and its helper process.
struct Setting {
    script: Option<String>,
    variables: Vec<(&'static str, String)>,
    /// Variables of the engine only.
    engine_variables: Vec<(&'static str, String)>,
    transfer: Value,
}

/// Running engine of a peer, and its helper process, which ends after it.
pub(super) struct Running {
    pub(super) engine: Engine,
    pub(super) helper: Option<HelperProcess>,
    /// Python interpreter of the peer's environment.
    pub(super) python: PathBuf,
}

/// Measures a peer with a fresh engine and a fresh store.
pub(super) fn measure(
    system: System,
    peer: Peer,
    context: &BenchContext,
    samples: &mut Samples,
) -> anyhow::Result<()> {
    let python = context.environments.python_of(peer).map_err(|why| anyhow!("{why}"))?;
    let files = context.peer_files();
    remove_folder(&files)?;
    fs::create_dir_all(&files).with_context(|| format!("cannot create {}", files.display()))?;
    samples.started(system, 1);
    let mut running = start(system, python, context)?;
    process_memory::reset_peaks(&running.pids())?;
    let seeds = context.seeds();
    let cold = save(&mut running.engine, context)?;
    samples.answered((system, Leg::Cold), &seeds, &cold, 0.0);
    if system.lacks(Leg::Nvme).is_none() {
        disk::await_files(context)?;
    }
    hits_in_memory(system, &mut running, context, samples)?;
    samples.held(system, ProcessMemory::by(&running.pids())?);
    if system.lacks(Leg::Nvme).is_none() {
        disk::nvme(system, &mut running, context, samples)?;
    }
    drop(running);
    if system.lacks(Leg::Restart).is_none() {
        samples.started(system, 1);
        disk::restart(system, &mut start(system, python, context)?, context, samples)?;
    }
    remove_folder(&files)
}

/// Measures loads from memory; prompts read from a device count as not found.
fn hits_in_memory(
    system: System,
    running: &mut Running,
    context: &BenchContext,
    samples: &mut Samples,
) -> anyhow::Result<()> {
    let (seeds, sizes) = (context.seeds(), context.sizes);
    let before = process_memory::device_read_bytes(&running.pids())?;
    let hits = running.engine.measure(&seeds, sizes.tokens())?;
    let read = process_memory::device_read_bytes(&running.pids())?.saturating_sub(before);
    // Whole prompts only, because a page of a library is sometimes read.
    let from_device = (read / sizes.prompt_bytes()) as f64 / seeds.len() as f64;
    let found = (found(&hits, sizes.cached_tokens) - from_device).max(0.0);
    samples.answered((system, Leg::Hit), &seeds, &hits, found);
    Ok(())
}

/// Saves the prompts of the measurement in a cache and waits until each is found, as far as the cache accepts
/// them; returns the answers to the uncached prompts.
pub(super) fn save(engine: &mut Engine, context: &BenchContext) -> anyhow::Result<Vec<Answer>> {
    let sizes = context.sizes;
    let mut cold = Vec::new();
    for seed in context.seeds() {
        cold.extend(engine.measure(&[seed], sizes.tokens())?);
        engine.await_saved(&[seed], sizes.tokens(), sizes.cached_tokens)?;
    }
    Ok(cold)
}

impl Running {
    /// Returns the root processes of engine and store.
    fn pids(&self) -> Vec<u32> {
        self.helper.iter().map(HelperProcess::pid).chain([self.engine.pid()]).collect()
    }
}

/// Starts and warms up a peer.
fn start(system: System, python: &Path, context: &BenchContext) -> anyhow::Result<Running> {
    let setting = setting(system, python, context)?;
    let helper = setting
        .script
        .as_ref()
        .map(|text| {
            let script = Script {
                text,
                variables: setting.variables.clone(),
                own_network: true,
                folder: &context.folder,
                name: system.name(),
            };
            HelperProcess::start(&script)
        })
        .transpose()?;
    let environment = EngineEnvironment {
        python: python.to_owned(),
        variables: setting.engine_variables.clone(),
        network_of: helper.as_ref().map(HelperProcess::pid),
        ..context.engine_environment(system.name())
    };
    let mut engine = Engine::start(&environment, &context.first_line(Some(&setting.transfer)))?;
    warm_up(&mut engine, context)?;
    Ok(Running { engine, helper, python: python.to_owned() })
}

/// Uses everything once before the measurement: a save, and the load that shows its end.
pub(super) fn warm_up(engine: &mut Engine, context: &BenchContext) -> anyhow::Result<()> {
    let (tokens, cached) = (context.sizes.tokens(), context.sizes.cached_tokens);
    engine.measure(&[WARM_UP], tokens)?;
    engine.await_saved(&[WARM_UP], tokens, cached)
}

/// Returns the share of cacheable tokens that were not computed.
pub(super) fn found(answers: &[Answer], cached: u64) -> f64 {
    let tokens: u64 = answers.iter().map(|answer| answer.cached.min(cached)).sum();
    tokens as f64 / (cached * answers.len() as u64) as f64
}

fn setting(system: System, python: &Path, context: &BenchContext) -> anyhow::Result<Setting> {
    let bytes = context.sizes.store_bytes();
    let files = context.peer_files();
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
            let config = context.folder.join(format!("{}.json", system.name()));
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

/// Returns the configuration of LMCache's adapter for files that bypasses the page cache.
fn lmcache_files(folder: &Path) -> String {
    json!({ "type": "fs_native", "base_path": folder, "use_odirect": true }).to_string()
}

/// Removes a folder if it exists.
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
    fn found_share_refers_to_cacheable_tokens() {
        let answer = |cached| Answer { ttft_ms: 1.0, ttlt_ms: 2.0, tokens: Vec::new(), cached };
        assert!((found(&[answer(4096), answer(0)], 4096) - 0.5).abs() < 1e-9);
        assert!((found(&[answer(4097)], 4096) - 1.0).abs() < 1e-9);
    }
}
