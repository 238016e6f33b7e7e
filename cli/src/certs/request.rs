//! `reprise certs request`: a certificate of a cluster in Kubernetes, for a person and a day.
//!
//! The key is created here. The request goes through the API server by `kubectl`, with the user's own account and its
//! authentication plugins. The operator issues the certificate if the account may `administer` or `observe` the
//! KVCacheCluster.

use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use reprise_identity::certificate::Fingerprint;
use reprise_identity::credentials::Files;
use reprise_identity::{Credentials, Identity, NewRequest, Role};
use reprise_testkit::output::Audience;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::date;

/// Signer of the requests, which the operator is.
const SIGNER: &str = "reprise.dev/process";
/// Time in which the operator answers.
const ANSWERED_WITHIN: Duration = Duration::from_secs(60);
/// Interval of reading the answer; each starts a process.
const POLL_EVERY: Duration = Duration::from_millis(500);

/// Arguments of `reprise certs request`.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct RequestArgs {
    /// Request a certificate of this role: admin or console.
    #[arg(value_name = "ROLE")]
    role: Role,
    /// Name the KVCacheCluster.
    #[arg(long, value_name = "NAME", default_value = "reprise")]
    cluster: String,
    /// Name the namespace of the KVCacheCluster.
    #[arg(long, value_name = "NAMESPACE", default_value = "reprise")]
    namespace: String,
    /// Write ca.crt, tls.crt and tls.key into this directory.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Run this program to reach the API server.
    #[arg(long, value_name = "PATH", default_value = "kubectl")]
    kubectl: PathBuf,
}

/// The received certificate, as JSON.
#[derive(Serialize)]
struct RequestedView {
    folder: PathBuf,
    identity: String,
    ends: String,
}

/// Parts of a CertificateSigningRequest that are read.
#[derive(Deserialize)]
struct Answered {
    #[serde(default)]
    status: Status,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Status {
    certificate: Option<String>,
    conditions: Vec<Condition>,
}

#[derive(Deserialize)]
struct Condition {
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    message: String,
}

pub(super) fn command(args: &RequestArgs, audience: Audience) -> anyhow::Result<()> {
    if !matches!(args.role, Role::Admin | Role::Console) {
        bail!("invalid role {}: expected admin or console; pods get their own certificates", args.role);
    }
    let identity = Identity::new(&format!("{}.{}", args.cluster, args.namespace), args.role.clone())?;
    let NewRequest { key, request } = NewRequest::create(&identity)?;
    let map = format!("{}-authorities", args.cluster);
    let namespace = args.namespace.as_str();
    let jsonpath = r"-o=jsonpath={.data.ca\.crt}";
    let authorities = args.kubectl(&["--namespace", namespace, "get", "configmap", &map, jsonpath], "")?;
    // Unique, because the key is new.
    let name = format!("reprise-{}", &Fingerprint::of(request.as_bytes()).to_string()[..32]);
    let manifest = json!({
        "apiVersion": "certificates.k8s.io/v1", "kind": "CertificateSigningRequest",
        "metadata": { "name": name },
        "spec": {
            "signerName": SIGNER, "usages": ["digital signature", "client auth"],
            "request": BASE64_STANDARD.encode(request),
        },
    });
    args.kubectl(&["create", "--filename=-"], &manifest.to_string())?;
    let certificate = args.wait(&name)?;
    let files = Files { authorities, certificate, key: key.into_bytes() };
    let credentials = Credentials::parse(&files).context("the issued certificate is unusable")?;
    credentials.check_issuer().context("the issued certificate is unusable")?;
    std::fs::create_dir_all(&args.out)
        .and_then(|()| files.write(&args.out))
        .with_context(|| format!("cannot write into {}", args.out.display()))?;
    let ends = date(credentials.not_after);
    let folder = args.out.display();
    audience.print_line(format!("got {identity} in {folder}, ends {ends}\nUse it with --tls {folder}"));
    audience.emit(&RequestedView { folder: args.out.clone(), identity: identity.to_string(), ends });
    Ok(())
}

impl RequestArgs {
    /// Waits for the answer to a request.
    fn wait(&self, name: &str) -> anyhow::Result<Vec<u8>> {
        let started = Instant::now();
        while started.elapsed() < ANSWERED_WITHIN {
            let text = self.kubectl(&["get", "certificatesigningrequests", name, "-o=json"], "")?;
            let Answered { status } =
                serde_json::from_slice(&text).context("kubectl prints other than JSON")?;
            if let Some(certificate) = status.certificate {
                return BASE64_STANDARD.decode(certificate).context("the certificate is not base64");
            }
            let is_refusal = |one: &&Condition| one.kind == "Denied" || one.kind == "Failed";
            if let Some(refusal) = status.conditions.iter().find(is_refusal) {
                bail!("the request was denied: {}", refusal.message);
            }
            std::thread::sleep(POLL_EVERY);
        }
        bail!(
            "the operator has not answered the request {name} within {ANSWERED_WITHIN:?}: check that it runs"
        )
    }

    /// Runs kubectl with this input, and returns its output.
    fn kubectl(&self, arguments: &[&str], input: &str) -> anyhow::Result<Vec<u8>> {
        let mut command = Command::new(&self.kubectl);
        command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let program = self.kubectl.display();
        let failed = || format!("cannot run {program}: install kubectl, or pass its path with --kubectl");
        let mut running = command.spawn().with_context(failed)?;
        let mut to = running.stdin.take().expect("piped");
        // A program that does not read its input reports its own error.
        let _ = to.write_all(input.as_bytes());
        drop(to);
        let output = running.wait_with_output().with_context(failed)?;
        if !output.status.success() {
            let error = String::from_utf8_lossy(&output.stderr);
            bail!("{program} {} failed: {}", arguments.join(" "), error.trim());
        }
        Ok(output.stdout)
    }
}
