//! `reprise certs`: certificates of a cluster without Kubernetes, and requests for those of a cluster in Kubernetes,
//! which its operator issues.
//!
//! The rules are in [`reprise_identity::authority_folder`]; this file has the arguments and the texts.

mod request;
mod show;

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
use reprise_identity::Role;
use reprise_identity::authority::CERTIFICATE_VALID;
use reprise_identity::authority_folder::{AuthorityFolder, IssuedRecord, Renewal, Step, Unrenewed};
use reprise_policy::Interval;
use reprise_testkit::output::Audience;
use serde::Serialize;

pub(crate) use show::{date, days};

/// Arguments of `reprise certs`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct CertsArgs {
    #[command(subcommand)]
    action: Action,
}

#[derive(Clone, Debug, clap::Subcommand)]
enum Action {
    /// Create the authority of a cluster.
    Init {
        /// Create the authority in this directory.
        #[arg(value_name = "AUTHORITY")]
        folder: PathBuf,
        /// Name the cluster: lower-case letters, digits, `-` and `.`.
        #[arg(long, value_name = "NAME")]
        cluster: String,
    },
    /// Issue a certificate with a new key.
    ///
    /// Writes ca.crt, tls.crt and tls.key.
    Issue {
        /// Issue for this role: agent/NODE, member, operator, admin or console.
        #[arg(value_name = "ROLE")]
        role: Role,
        /// Write the files into this directory.
        #[arg(long, value_name = "DIR")]
        out: PathBuf,
        #[command(flatten)]
        from: FromArgs,
    },
    /// Renew certificates in place when they are due.
    ///
    /// Due are certificates with a third of their validity left, and all after a step of `certs authority`.
    Renew {
        /// Renew the certificates in these directories.
        #[arg(value_name = "DIR", required = true)]
        folders: Vec<PathBuf>,
        #[command(flatten)]
        from: FromArgs,
        /// Also renew certificates that are not due.
        #[arg(long)]
        force: bool,
    },
    /// Request a certificate for a day from a cluster in Kubernetes.
    ///
    /// Runs kubectl with your account, which must be permitted to `administer` or `observe` the KVCacheCluster.
    Request(request::RequestArgs),
    /// Show certificates or the authority of a directory.
    Show {
        /// Read these directories.
        #[arg(value_name = "DIR", required = true)]
        folders: Vec<PathBuf>,
    },
    /// Replace the authority in three steps.
    ///
    /// After each step, renew all directories and wait until all processes use the new files.
    Authority {
        #[command(subcommand)]
        step: StepAction,
    },
}

/// Authority and validity of new certificates.
#[derive(Clone, Debug, clap::Args)]
struct FromArgs {
    /// Issue from the authority in this directory.
    #[arg(long, value_name = "AUTHORITY")]
    authority: PathBuf,
    /// End the validity after this time, for example 30d.
    ///
    /// At least a day, and at most until the authority ends.
    #[arg(long, value_name = "TIME", default_value_t = default_validity())]
    valid: Interval,
}

#[derive(Clone, Debug, clap::Subcommand)]
enum StepAction {
    /// Create the next authority; processes will trust both.
    Add {
        /// Change the authority in this directory.
        #[arg(value_name = "AUTHORITY")]
        folder: PathBuf,
    },
    /// Issue from the next authority, and delete the key of the former one.
    Switch(StepArgs),
    /// Stop trusting the former authority.
    Remove(StepArgs),
}

#[derive(Clone, Debug, clap::Args)]
struct StepArgs {
    /// Change the authority in this directory.
    #[arg(value_name = "AUTHORITY")]
    folder: PathBuf,
    /// Abandon processes whose certificates were not renewed.
    #[arg(long)]
    force: bool,
}

fn default_validity() -> Interval {
    Interval(Duration::from_secs(CERTIFICATE_VALID.whole_seconds().unsigned_abs()))
}

/// An authority after a command, as JSON.
#[derive(Serialize)]
struct AuthorityView {
    authority: PathBuf,
    cluster: String,
    step: Step,
    issuer: String,
    authorities_digest: String,
}

impl AuthorityView {
    fn new(folder: &Path, authority: &AuthorityFolder) -> AuthorityView {
        AuthorityView {
            authority: folder.to_owned(),
            cluster: authority.cluster().to_owned(),
            step: authority.step(),
            issuer: authority.issuer().to_string(),
            authorities_digest: authority.authorities_digest().to_string(),
        }
    }
}

/// An issued certificate, as JSON.
#[derive(Serialize)]
struct IssuedView<'a> {
    folder: &'a Path,
    identity: String,
    renewed: bool,
    reason: Option<&'a str>,
    ends: Option<String>,
    due_in_days: Option<u64>,
}

pub(crate) fn command(args: &CertsArgs, audience: Audience) -> anyhow::Result<()> {
    match &args.action {
        Action::Init { folder, cluster } => {
            let created = AuthorityFolder::create(folder, cluster)?;
            audience.emit(&AuthorityView::new(folder, &created));
            audience.print_line(format!(
                "created the authority of cluster {cluster} in {}\nKeep a copy of ca.key where no other process reads it: \
                 its holder can be any process of the cluster.",
                folder.display()
            ));
            Ok(())
        }
        Action::Issue { role, out, from } => {
            let authority = AuthorityFolder::open(&from.authority)?;
            let record = authority.issue(role.clone(), from.valid.0, out)?;
            print_issued(audience, &record, "issued", None);
            Ok(())
        }
        Action::Renew { folders, from, force } => renew(folders, from, *force, audience),
        Action::Request(args) => request::command(args, audience),
        Action::Show { folders } => show::command(folders, audience),
        Action::Authority { step } => change_authority(step, audience),
    }
}

fn print_issued(audience: Audience, record: &IssuedRecord, what: &str, reason: Option<&str>) {
    let ends = date(record.not_after);
    let reason_text = reason.map(|reason| format!(" ({reason})")).unwrap_or_default();
    audience.print_line(format!(
        "{what} {} in {}, ends {ends}{reason_text}",
        record.identity,
        record.folder.display()
    ));
    audience.emit(&IssuedView {
        folder: &record.folder,
        identity: record.identity.to_string(),
        renewed: true,
        reason,
        ends: Some(ends),
        due_in_days: None,
    });
}

/// Renews all folders, and fails at the end if one could not be renewed.
fn renew(folders: &[PathBuf], from: &FromArgs, force: bool, audience: Audience) -> anyhow::Result<()> {
    let authority = AuthorityFolder::open(&from.authority)?;
    let mut failed = Vec::new();
    for folder in folders {
        match authority.renew(folder, from.valid.0, force.then_some("--force")) {
            Ok(Renewal::Renewed { why, record }) => print_issued(audience, &record, "renewed", Some(why)),
            Ok(Renewal::NotDue { identity, due_in }) => {
                let due_in_days = days(due_in);
                audience.print_line(format!(
                    "kept {identity} in {}: due in {due_in_days} days",
                    folder.display()
                ));
                audience.emit(&IssuedView {
                    folder,
                    identity: identity.to_string(),
                    renewed: false,
                    reason: None,
                    ends: None,
                    due_in_days: Some(due_in_days),
                });
            }
            Err(error) => failed.push(error.to_string()),
        }
    }
    if !failed.is_empty() {
        bail!("cannot renew {} of {} directories: {}", failed.len(), folders.len(), failed.join("; "));
    }
    Ok(())
}

fn change_authority(step: &StepAction, audience: Audience) -> anyhow::Result<()> {
    let unrenewed = |force: bool| if force { Unrenewed::Abandon } else { Unrenewed::Refuse };
    let (folder, changed, next) = match step {
        StepAction::Add { folder } => {
            let changed = AuthorityFolder::open(folder)?.add()?;
            (folder, changed, "processes will trust both authorities; next: reprise certs authority switch")
        }
        StepAction::Switch(StepArgs { folder, force }) => {
            let changed = AuthorityFolder::open(folder)?.switch(unrenewed(*force)).context("switch")?;
            (folder, changed, "the next authority issues; next: reprise certs authority remove")
        }
        StepAction::Remove(StepArgs { folder, force }) => {
            let changed = AuthorityFolder::open(folder)?.remove(unrenewed(*force)).context("remove")?;
            (folder, changed, "the former authority is no longer trusted; this was the last step")
        }
    };
    audience.emit(&AuthorityView::new(folder, &changed));
    audience.print_line(format!(
        "{next}\nNow renew all directories, copy them to their machines, and wait until all processes report\nauthorities_digest {}",
        changed.authorities_digest()
    ));
    Ok(())
}
