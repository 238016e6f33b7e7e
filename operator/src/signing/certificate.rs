//! `reprise-operator certificate`: keeps the certificate of a pod's process, as a sidecar of its pod.
//!
//! ```text
//! ConfigMap of authorities ──▶ ca.crt ┐
//! new key ────────────────────▶ tls.key ├─▶ folder of the pod ──▶ agent, member or etcd reads the files
//! API server ─── operator ────▶ tls.crt ┘
//! ```
//!
//! The key is created here and stays in the volumes of the pod. A certificate is requested if there is no usable one, from two thirds of its
//! validity on, and some minutes after another authority issues: by then, all pods trust both ([`keep_certificate`]).
//!
//! Pods may `get` a request but not list or watch requests, so they can read only requests whose names they know. Names
//! are 128 bits of the digest of a request, whose key is new. RBAC cannot restrict `get` to the names that an account has created.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use clap::Args;
use k8s_openapi::ByteString;
use k8s_openapi::api::certificates::v1::CertificateSigningRequest;
use kube::Client;
use kube::api::{Api, PostParams};
use reprise_identity::certificate::Fingerprint;
use reprise_identity::credentials::{Files, KEY_FILE};
use reprise_identity::{Identity, NewRequest};
use serde_json::json;
use tokio::time::Instant;

use crate::framework::backoff::Backoff;
use crate::framework::clock;
use crate::reconcile::authority::{keep_certificate, usable};
use crate::signing::SIGNER;
use crate::signing::review::USAGES;

/// Interval at which files are compared, as in the processes that follow them.
const CHECK_EVERY: Duration = Duration::from_secs(2);

/// Time in which a request is answered. The operator may be starting, so a later request is tried again.
const ANSWERED_WITHIN: Duration = Duration::from_secs(60);

/// Longest time between two attempts.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(30);

/// Hexadecimal digits of the digest in the name of a request.
const NAME_DIGITS: usize = 32;

/// Interval of reading the request.
const POLL_EVERY: Duration = Duration::from_millis(500);

/// Time for which a check waits for the first certificate. The kubelet reports each failed probe as a warning, also those
/// before the operator has answered.
pub const CHECK_WAITS: Duration = Duration::from_secs(50);

/// Paths and identity of a pod.
#[derive(Clone, Debug, Args)]
pub struct PodCertificate {
    /// Identity of the process, like reprise://CLUSTER.NAMESPACE/agent/NODE
    #[arg(long, env = "REPRISE_IDENTITY")]
    pub identity: Identity,
    /// Folder for ca.crt, tls.crt and tls.key
    #[arg(long)]
    pub folder: PathBuf,
    /// File with the certificates of the trusted authorities
    #[arg(long)]
    pub authorities: PathBuf,
}

impl PodCertificate {
    /// Waits for usable files in the folder, for at most [`CHECK_WAITS`]: the probe of the kubelet.
    ///
    /// # Errors
    /// They are absent, of another identity, have ended, or trust other authorities than the pod should.
    pub async fn check(&self) -> anyhow::Result<()> {
        let check = || {
            let files = Files::read(&self.folder)?;
            let remaining = usable(&files, &self.identity)?.remaining(clock::system_time());
            ensure!(!remaining.is_zero(), "the certificate has ended");
            // A folder that has outlived its pod may still have those before.
            let is_current = files.authorities == self.read_authorities()?;
            ensure!(is_current, "the folder does not have the present authorities yet");
            anyhow::Ok(())
        };
        let until = Instant::now() + CHECK_WAITS;
        while check().is_err() && Instant::now() < until {
            tokio::time::sleep(POLL_EVERY).await;
        }
        check()
    }

    fn read_authorities(&self) -> anyhow::Result<Vec<u8>> {
        std::fs::read(&self.authorities)
            .with_context(|| format!("cannot read {}", self.authorities.display()))
    }

    /// Keeps the certificate until the task is aborted.
    pub async fn keep(&self, client: &Client) {
        let backoff = Backoff::default();
        let mut seen = (Vec::new(), Instant::now());
        loop {
            let wait = match self.step(client, &mut seen).await {
                Ok(()) => {
                    backoff.record_success(KEY_FILE);
                    CHECK_EVERY
                }
                Err(error) => {
                    let wait = backoff.record_failure(KEY_FILE).min(RETRY_AFTER_MAX);
                    tracing::warn!(error = format!("{error:#}"), ?wait, "cannot get a certificate; retrying");
                    wait
                }
            };
            tokio::time::sleep(wait).await;
        }
    }

    /// Replaces the files if that is needed. `seen` are the authorities that were seen last, and since when.
    async fn step(&self, client: &Client, seen: &mut (Vec<u8>, Instant)) -> anyhow::Result<()> {
        let authorities = self.read_authorities()?;
        if seen.0 != authorities {
            *seen = (authorities.clone(), Instant::now());
        }
        let present = Files::read(&self.folder).ok();
        let trusted = (authorities.as_slice(), seen.1.elapsed());
        let keep = |files| keep_certificate(files, &self.identity, trusted, clock::system_time());
        let files = match present.as_ref().and_then(keep) {
            Some(files) => files,
            None => self.request(client, authorities).await?,
        };
        if present.as_ref() != Some(&files) {
            files.write(&self.folder).context("cannot write the files")?;
            tracing::info!(identity = %self.identity, "use other certificates");
        }
        Ok(())
    }

    /// Requests a certificate and waits for it.
    async fn request(&self, client: &Client, authorities: Vec<u8>) -> anyhow::Result<Files> {
        let NewRequest { key, request } = NewRequest::create(&self.identity)?;
        let requests: Api<CertificateSigningRequest> = Api::all(client.clone());
        let name = format!("reprise-{}", &Fingerprint::of(request.as_bytes()).to_string()[..NAME_DIGITS]);
        let wanted = json!({
            "metadata": { "name": name },
            "spec": { "request": ByteString(request.into_bytes()), "signerName": SIGNER, "usages": USAGES },
        });
        let wanted = serde_json::from_value(wanted).expect("made above");
        requests.create(&PostParams::default(), &wanted).await.context("cannot request a certificate")?;
        let certificate = wait(&requests, &name).await?;
        let files = Files { authorities, certificate, key: key.into_bytes() };
        // A mix of old and new authorities: the file is read again with the next attempt.
        usable(&files, &self.identity).context("the issued certificate is unusable")?;
        Ok(files)
    }
}

/// Waits until a request has a certificate.
async fn wait(requests: &Api<CertificateSigningRequest>, name: &str) -> anyhow::Result<Vec<u8>> {
    let started = Instant::now();
    while started.elapsed() < ANSWERED_WITHIN {
        let status = requests.get(name).await.context("cannot read the request")?.status.unwrap_or_default();
        if let Some(certificate) = status.certificate {
            return Ok(certificate.0);
        }
        let mut refusals = status.conditions.into_iter().flatten();
        if let Some(refusal) = refusals.find(|one| one.type_ == "Denied" || one.type_ == "Failed") {
            bail!("the request {name} was denied: {}", refusal.message.unwrap_or_default());
        }
        tokio::time::sleep(POLL_EVERY).await;
    }
    bail!("the operator has not answered the request {name} within {ANSWERED_WITHIN:?}: check that it runs")
}
