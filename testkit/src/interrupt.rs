//! Handling of SIGINT and SIGTERM in commands that start processes: the started processes end first, then the
//! command.
//!
//! Signals are global to the process, and so is the state here. One thread waits for signals, from the first
//! cluster on. Processes are started under [`defer`], so that the signal handler finds every started process
//! recorded.

use std::path::{Path, PathBuf};
use std::sync::mpsc::SyncSender;
use std::sync::{Mutex, MutexGuard, Once, PoisonError};

use anyhow::Context;
use tokio::signal::unix::{SignalKind, signal};

use crate::cluster;

/// Exit code after a signal: 128 + SIGINT, as in shells.
const EXIT_INTERRUPTED: i32 = 130;

/// Action on SIGINT or SIGTERM.
#[derive(Debug)]
enum OnInterrupt {
    /// Exit.
    Exit,
    /// End the processes of the cluster in this directory, then exit.
    StopCluster(PathBuf),
    /// Send a message; the receiver ends everything in order.
    Notify(SyncSender<()>),
}

static STARTED: Once = Once::new();
static ON_INTERRUPT: Mutex<OnInterrupt> = Mutex::new(OnInterrupt::Exit);

/// Guard that delays the handling of signals while it exists.
pub struct DeferGuard {
    _guard: MutexGuard<'static, OnInterrupt>,
}

/// Sets the action: end the cluster in `directory`, then exit. Starts the signal thread on the first call.
pub fn stop_cluster(directory: &Path) -> anyhow::Result<()> {
    *state() = OnInterrupt::StopCluster(directory.to_owned());
    let mut started = Ok(());
    STARTED.call_once(|| started = start());
    started
}

/// Sets the action: exit.
pub fn exit_only() {
    *state() = OnInterrupt::Exit;
}

/// Sets the action: send one message.
pub fn notify(sender: SyncSender<()>) {
    *state() = OnInterrupt::Notify(sender);
}

/// Delays the handling of signals, so that a process is started and recorded as one step.
pub fn defer() -> DeferGuard {
    DeferGuard { _guard: state() }
}

fn state() -> MutexGuard<'static, OnInterrupt> {
    ON_INTERRUPT.lock().unwrap_or_else(PoisonError::into_inner)
}

fn start() -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    // Registered before the thread starts, so that a signal in between is not lost.
    let (mut terminate, mut interrupt) = {
        let _entered = runtime.enter();
        (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?)
    };
    std::thread::Builder::new()
        .name("interrupt".into())
        .spawn(move || {
            loop {
                runtime.block_on(async {
                    tokio::select! {
                        _ = terminate.recv() => {}
                        _ = interrupt.recv() => {}
                    }
                });
                act();
            }
        })
        .context("cannot spawn the signal thread")?;
    Ok(())
}

fn act() {
    let state = state();
    match &*state {
        OnInterrupt::Notify(sender) => {
            // A full channel means that the receiver already has a message.
            let _ = sender.try_send(());
            return;
        }
        OnInterrupt::StopCluster(directory) => {
            if let Err(error) = cluster::end_recorded(directory) {
                tracing::warn!(error = format!("{error:#}"), "cannot stop all processes of the cluster");
            }
        }
        OnInterrupt::Exit => {}
    }
    std::process::exit(EXIT_INTERRUPTED);
}
