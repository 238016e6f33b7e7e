//! Members of the control plane as processes.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use reprise_identity::Security;
use reprise_proto::controlplane::membership_client::MembershipClient;
use reprise_proto::controlplane::{ListMembersRequest, MemberList};
use reprise_proto::dial;
use serde::{Deserialize, Serialize};
use tonic::transport::Endpoint;

use super::process::{Process, STOP_WITHIN};
use super::work_directory::WorkDirectory;
use crate::configuration::{MemberConfig, StoreChoice};

const PROGRAM: &str = "reprise-controlplane";

/// Lifetime of members that share a store: etcd's minimum with its default election timeout.
const TIME_TO_LIVE: &str = "member.time_to_live = \"2s\"";

/// Time limit for the members to find each other: the lease of a killed process can block a name for two
/// lifetimes.
const REGISTERED_WITHIN: Duration = Duration::from_secs(60);

const REGISTERED_PAUSE: Duration = Duration::from_millis(10);

/// Addresses of one member.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemberAddresses {
    /// Name of the member.
    pub name: String,
    /// gRPC address, `host:port`.
    pub grpc: String,
    /// Admin address, `host:port`.
    pub admin: String,
}

#[derive(Debug)]
pub(super) struct Member {
    name: String,
    config: PathBuf,
    log: PathBuf,
    process: Process,
}

impl Member {
    /// Starts a member on a free port, which it keeps across restarts.
    pub(super) fn start(
        name: &str,
        (store, tls): (&StoreChoice, Option<&Path>),
        directory: &mut WorkDirectory,
    ) -> anyhow::Result<Member> {
        let config = directory.path().join(format!("{name}.toml"));
        let log = directory.path().join(format!("{name}.log"));
        let write = |listen: &str| {
            let text = MemberConfig { listen, admin: "127.0.0.1:0", store, name: Some(name), tls };
            fs::write(&config, text.text(TIME_TO_LIVE))
                .with_context(|| format!("cannot write {}", config.display()))
        };
        write("127.0.0.1:0")?;
        let process = Process::start(PROGRAM, &config, &log, directory)?;
        write(&process.ready.grpc)?;
        Ok(Member { name: name.to_owned(), config, log, process })
    }

    /// Restarts a killed member.
    pub(super) fn restart(&mut self, directory: &mut WorkDirectory) -> anyhow::Result<()> {
        self.process = Process::start(PROGRAM, &self.config, &self.log, directory)?;
        Ok(())
    }

    pub(super) fn addresses(&self) -> MemberAddresses {
        let ready = &self.process.ready;
        MemberAddresses { name: self.name.clone(), grpc: ready.grpc.clone(), admin: ready.admin.clone() }
    }

    pub(super) fn pid(&self) -> u32 {
        self.process.child.id()
    }

    pub(super) fn kill(&mut self) {
        self.process.child.kill();
    }

    pub(super) fn stop(&mut self) {
        self.process.child.stop(STOP_WITHIN);
    }
}

/// Waits until each of these members is registered and lists exactly these members.
pub(super) fn all_registered(members: &[MemberAddresses], security: &Security) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let deadline = Instant::now() + REGISTERED_WITHIN;
        for member in members {
            loop {
                let list = list(&member.grpc, security).await?;
                if list.registered && lists_exactly(&list, members) {
                    break;
                }
                ensure!(
                    Instant::now() < deadline,
                    "the members did not find each other within {REGISTERED_WITHIN:?}: {} lists {:?}",
                    member.name,
                    list.members.iter().map(|other| other.name.as_str()).collect::<Vec<_>>()
                );
                tokio::time::sleep(REGISTERED_PAUSE).await;
            }
        }
        Ok(())
    })
}

async fn list(address: &str, security: &Security) -> anyhow::Result<MemberList> {
    let endpoint = Endpoint::from_shared(format!("http://{address}"))?;
    let channel = dial::connect(&endpoint, security).await.context("connecting")?;
    let mut client = MembershipClient::new(channel);
    Ok(client.list_members(ListMembersRequest {}).await.context("listing members")?.into_inner())
}

fn lists_exactly(list: &MemberList, members: &[MemberAddresses]) -> bool {
    let known = |member: &MemberAddresses| {
        list.members.iter().any(|other| other.name == member.name && other.address == member.grpc)
    };
    list.members.len() == members.len() && members.iter().all(known)
}
