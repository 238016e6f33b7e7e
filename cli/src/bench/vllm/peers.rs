//! Other caches for vLLM, each measured as its makers describe its use on one host: engine, prompts and order of prompts are
//! those of our own measurement. What needs a network has one of its own, a namespace with nothing outside.

use std::fs;
use std::path::Path;

use anyhow::Context;
use serde_json::{Value, json};

use super::companion::{Companion, Script};
use super::engine::{Answer, Engine, Surroundings};
use super::samples::{Leg, Memory, Samples, System};
use super::{Peer, WARM_UP, World};

/// Where Mooncake's processes find each other; it refuses loopback.
const ADDRESS: &str = "10.77.0.1";
const MASTER_PORT: u16 = 50051;
const LMCACHE_PORT: u16 = 5555;

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

const LMCACHE: &str = r"
${PYTHON%/*}/lmcache server --host 127.0.0.1 --port $LMCACHE_PORT --l1-size-gb $GIB --l1-init-size-gb $GIB --eviction-policy LRU \
    --shm-name reprise-bench-$$ --supported-transfer-mode engine_driven &
listens 127.0.0.1 $LMCACHE_PORT
";

/// A peer's engine and what is beside it, as they are started.
struct Setting {
    script: Option<String>,
    variables: Vec<(&'static str, String)>,
    /// Of the engine alone.
    engine_variables: Vec<(&'static str, String)>,
    transfer: Value,
}

/// Measures a peer with a fresh engine and a fresh store.
pub(super) fn measure(
    system: System,
    peer: Peer,
    world: &World,
    samples: &mut Samples,
) -> anyhow::Result<()> {
    let python = world.environments.python_of(peer).to_owned();
    let files = world.folder.join("example-files");
    remove_folder(&files)?;
    let setting = setting(system, &python, world, &files)?;
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
        python,
        variables: setting.engine_variables.clone(),
        network_of: companion.as_ref().map(Companion::pid),
        ..world.surroundings(system.name())
    };
    let first = world.first_line(Some(&setting.transfer));
    let mut engine = Engine::start(&surroundings, &first)?;
    let (seeds, tokens, cached) = (world.seeds(), world.sizes.tokens(), world.sizes.cached_tokens);
    warm_up(&mut engine, world)?;
    let mut cold = Vec::new();
    for seed in &seeds {
        cold.extend(engine.measure(&[*seed], tokens)?);
        engine.settle(&[*seed], tokens, cached)?;
    }
    samples.answered((system, Leg::Cold), &seeds, &cold, 0.0);
    let hits = engine.measure(&seeds, tokens)?;
    samples.answered((system, Leg::Hit), &seeds, &hits, found(&hits, cached));
    let store = companion.as_ref().map_or(Ok(0), Companion::peak_bytes)?;
    samples.remembered(system, Memory { engine: engine.peak_bytes()?, store });
    drop(engine);
    // The others keep KV in memory only: a restart is a cold start.
    if system == System::Example {
        let mut engine = Engine::start(&surroundings, &first)?;
        warm_up(&mut engine, world)?;
        let again = engine.measure(&seeds, tokens)?;
        samples.answered((system, Leg::Restart), &seeds, &again, found(&again, cached));
    }
    remove_folder(&files)
}

/// Everything is used once before it counts.
pub(super) fn warm_up(engine: &mut Engine, world: &World) -> anyhow::Result<()> {
    let (tokens, cached) = (world.sizes.tokens(), world.sizes.cached_tokens);
    engine.measure(&[WARM_UP], tokens)?;
    engine.settle(&[WARM_UP], tokens, cached)?;
    engine.measure(&[WARM_UP], tokens)?;
    Ok(())
}

/// The share of the tokens that were not computed, of those that need not be.
fn found(answers: &[Answer], cached: u64) -> f64 {
    let tokens: u64 = answers.iter().map(|answer| answer.cached.min(cached)).sum();
    tokens as f64 / (cached * answers.len() as u64) as f64
}

fn setting(system: System, python: &Path, world: &World, files: &Path) -> anyhow::Result<Setting> {
    let bytes = world.sizes.store_bytes();
    let variables = vec![
        ("PYTHON", python.to_string_lossy().into_owned()),
        ("ADDRESS", ADDRESS.to_owned()),
        ("MASTER_PORT", MASTER_PORT.to_string()),
        ("LMCACHE_PORT", LMCACHE_PORT.to_string()),
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

fn remove_folder(folder: &Path) -> anyhow::Result<()> {
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
        let answer = |cached| Answer { ttft_ms: 1.0, tokens: Vec::new(), cached };
        assert!((found(&[answer(4096), answer(0)], 4096) - 0.5).abs() < 1e-9);
        assert!((found(&[answer(4097)], 4096) - 1.0).abs() < 1e-9);
    }
}
