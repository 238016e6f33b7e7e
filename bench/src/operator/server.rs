//! Kubernetes' API server and the operator as processes, on loopback. The operator has all permissions; other
//! tests cover its ClusterRole.
//!
//! `e2e/kubernetes/build.sh` builds the API server's binary into the cache directory.

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use serde_json::json;
use tokio::runtime::Runtime;

use crate::helper_process::{HelperProcess, Script};
use reprise_testkit::bench::process_memory;
use reprise_testkit::cluster::cache_directory;
use reprise_testkit::process::sibling_binary;

/// kube-apiserver binary that the script builds; the version equals the one in go.mod.
const BINARY: &str = "kube-apiserver-v1.36.3";

/// Time limit of a start, which takes about 5 s.
const READY_WITHIN: Duration = Duration::from_secs(120);

const PAUSE: Duration = Duration::from_millis(100);

/// Bearer token of a cluster admin; valid only on loopback and during the measurement.
const TOKEN: &str = "reprise-bench";

/// Starts the API server in the background; the helper process ends it. The API server creates its own
/// certificate.
const START_API_SERVER: &str = r#"
"$PROGRAM" --etcd-servers="$ETCD" --etcd-prefix=/kubernetes --bind-address=127.0.0.1 --advertise-address=127.0.0.1 \
    --secure-port="$PORT" --cert-dir="$FOLDER/tls" --token-auth-file="$FOLDER/tokens.csv" --authorization-mode=RBAC \
    --service-account-issuer=https://kubernetes.default.svc --service-account-key-file="$FOLDER/accounts.pub" \
    --service-account-signing-key-file="$FOLDER/accounts.key" --service-cluster-ip-range=10.96.0.0/16 \
    --endpoint-reconciler-type=none &
until [ -s "$FOLDER/tls/apiserver.crt" ]; do kill -0 $!; sleep 0.1; done
"#;

/// Starts the operator, which is ready when it has printed its admin address.
const START_OPERATOR: &str = r#"
"$PROGRAM" run --pod-name bench --pod-namespace default --admin-listen 127.0.0.1:0 > "$FOLDER/operator.ready" &
echo $! > "$FOLDER/operator.pid"
until [ -s "$FOLDER/operator.ready" ]; do kill -0 $!; sleep 0.1; done
"#;

pub(super) struct ApiServer {
    kubeconfig: PathBuf,
    _process: HelperProcess,
}

pub(super) struct Operator {
    admin: String,
    pid: u32,
    _process: HelperProcess,
}

/// Returns the path of the API server's binary, which may not exist.
pub(crate) fn binary() -> PathBuf {
    cache_directory().join("bin").join(BINARY)
}

impl ApiServer {
    /// Starts an API server with the etcd at this address, with its files in `folder`, and waits until it is
    /// ready.
    pub(super) fn start(folder: &Path, etcd: &str, runtime: &Runtime) -> anyhow::Result<ApiServer> {
        let program = binary();
        if !program.is_file() {
            bail!("{} is missing: build it with `make kubernetes` in the source tree", program.display());
        }
        let write = |name: &str, text: &str| {
            let path = folder.join(name);
            fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
            anyhow::Ok(path)
        };
        let accounts = rcgen::KeyPair::generate().context("cannot generate the service account key")?;
        write("accounts.key", &accounts.serialize_pem())?;
        write("accounts.pub", &accounts.public_key_pem())?;
        write("tokens.csv", &format!("{TOKEN},bench,bench,\"system:masters\"\n"))?;
        let listener = TcpListener::bind("127.0.0.1:0").context("cannot bind a port on loopback")?;
        let port = listener.local_addr()?.port();
        drop(listener);
        let kubeconfig = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "bench",
            "clusters": [{ "name": "bench", "cluster": {
                "server": format!("https://127.0.0.1:{port}"), "certificate-authority": folder.join("tls/apiserver.crt"),
            } }],
            "users": [{ "name": "bench", "user": { "token": TOKEN } }],
            "contexts": [{ "name": "bench", "context": { "cluster": "bench", "user": "bench" } }],
        });
        let kubeconfig = write("kubeconfig", &kubeconfig.to_string())?;
        let variables = vec![
            ("PROGRAM", program.display().to_string()),
            ("ETCD", etcd.to_owned()),
            ("PORT", port.to_string()),
            ("FOLDER", folder.display().to_string()),
        ];
        let script =
            Script { text: START_API_SERVER, variables, own_network: false, folder, name: "apiserver" };
        let server = ApiServer { kubeconfig, _process: HelperProcess::start(&script)? };
        server.wait_until_ready(folder, runtime)?;
        Ok(server)
    }

    /// Returns a client with all permissions.
    pub(super) fn client(&self, runtime: &Runtime) -> anyhow::Result<Client> {
        runtime.block_on(async {
            let file = Kubeconfig::read_from(&self.kubeconfig)?;
            let config = Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await?;
            anyhow::Ok(Client::try_from(config)?)
        })
    }

    fn wait_until_ready(&self, folder: &Path, runtime: &Runtime) -> anyhow::Result<()> {
        let client = self.client(runtime)?;
        let deadline = Instant::now() + READY_WITHIN;
        while Instant::now() < deadline {
            if runtime.block_on(client.apiserver_version()).is_ok() {
                return Ok(());
            }
            std::thread::sleep(PAUSE);
        }
        bail!(
            "the API server did not answer within {READY_WITHIN:?}; see {}",
            folder.join("apiserver.log").display()
        )
    }
}

/// Applies the CustomResourceDefinitions with the operator's program.
pub(super) fn apply_definitions(api: &ApiServer) -> anyhow::Result<()> {
    let output = Command::new(sibling_binary("reprise-operator")?)
        .arg("apply-definitions")
        .env("KUBECONFIG", &api.kubeconfig)
        .output()
        .context("cannot run reprise-operator")?;
    ensure!(
        output.status.success(),
        "cannot apply the definitions: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}

impl Operator {
    /// Starts an operator, with its log in `folder`.
    pub(super) fn start(folder: &Path, api: &ApiServer) -> anyhow::Result<Operator> {
        let ready = folder.join("operator.ready");
        drop(fs::remove_file(&ready));
        let variables = vec![
            ("PROGRAM", sibling_binary("reprise-operator")?.display().to_string()),
            ("KUBECONFIG", api.kubeconfig.display().to_string()),
            ("FOLDER", folder.display().to_string()),
        ];
        let script = Script { text: START_OPERATOR, variables, own_network: false, folder, name: "operator" };
        let process = HelperProcess::start(&script)?;
        let line: serde_json::Value = serde_json::from_str(&fs::read_to_string(&ready)?)
            .context("cannot parse the operator's ready line")?;
        let admin =
            line["admin"].as_str().context("the operator's ready line has no admin address")?.to_owned();
        let pid = fs::read_to_string(folder.join("operator.pid"))?
            .trim()
            .parse()
            .context("cannot parse the operator's pid file")?;
        Ok(Operator { admin, pid, _process: process })
    }

    /// Returns the operator's admin address, `host:port`.
    pub(super) fn admin(&self) -> &str {
        &self.admin
    }

    /// Returns the peak resident memory of the operator's process tree, in bytes.
    pub(super) fn peak_bytes(&self) -> anyhow::Result<u64> {
        process_memory::tree_peak_bytes(self.pid)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn binary_has_the_version_that_the_script_builds() {
        // The tree in which the tests run; several trees may share one build folder.
        let package =
            std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
        let module = Path::new(&package).join("../e2e/kubernetes/go.mod");
        let module = fs::read_to_string(module).expect("the file exists");
        let version = BINARY.strip_prefix("kube-apiserver-").expect("the name has this prefix");
        assert!(module.contains(&format!("require k8s.io/kubernetes {version}\n")), "{version}");
    }
}
