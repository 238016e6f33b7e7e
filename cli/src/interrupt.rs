//! What SIGINT and SIGTERM do to a command that has started processes: they end first, then the command.
//!
//! Signals are the process's, so this is too: one thread waits for them, from the first cluster on. Processes are
//! started under [`hold_off`], so an interruption finds every one of them recorded.

use std::path::{Path, PathBuf};
use std::sync::mpsc::SyncSender;
use std::sync::{Mutex, MutexGuard, Once, PoisonError};

use anyhow::Context;
use tokio::signal::unix::{SignalKind, signal};

use crate::cluster;

/// Exit code of a command that was interrupted: 128 + SIGINT, as shells have it.
const EXIT_INTERRUPTED: i32 = 130;

/// What an interruption does now.
#[derive(Debug)]
enum OnInterrupt {
    /// Ends this process.
    Exit,
    /// Ends the processes of the cluster in this directory, then this process.
    EndCluster(PathBuf),
    /// Tells whoever waits for it, who ends everything in order.
    Tell(SyncSender<()>),
}

static STARTED: Once = Once::new();
static ON_INTERRUPT: Mutex<OnInterrupt> = Mutex::new(OnInterrupt::Exit);

/// No interruption is acted on while this is held.
pub(crate) struct HeldOff {
    _guard: MutexGuard<'static, OnInterrupt>,
}

/// From now on an interruption ends the cluster in `directory`.
pub(crate) fn ends_cluster(directory: &Path) -> anyhow::Result<()> {
    *state() = OnInterrupt::EndCluster(directory.to_owned());
    let mut started = Ok(());
    STARTED.call_once(|| started = start());
    started
}

/// From now on an interruption just ends this process.
pub(crate) fn ends_only_this() {
    *state() = OnInterrupt::Exit;
}

/// From now on an interruption sends one message.
pub(crate) fn tells(sender: SyncSender<()>) {
    *state() = OnInterrupt::Tell(sender);
}

/// Lets a process be started and recorded in one piece.
pub(crate) fn hold_off() -> HeldOff {
    HeldOff { _guard: state() }
}

fn state() -> MutexGuard<'static, OnInterrupt> {
    ON_INTERRUPT.lock().unwrap_or_else(PoisonError::into_inner)
}

fn start() -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    // Registered here, so that a signal right after this is not missed.
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
        .context("cannot start the thread that waits for signals")?;
    Ok(())
}

fn act() {
    let state = state();
    match &*state {
        OnInterrupt::Tell(sender) => {
            // Full: it has been told already.
            let _ = sender.try_send(());
            return;
        }
        OnInterrupt::EndCluster(directory) => {
            if let Err(error) = cluster::end_recorded(directory) {
                tracing::warn!(error = format!("{error:#}"), "processes may be left");
            }
        }
        OnInterrupt::Exit => {}
    }
    std::process::exit(EXIT_INTERRUPTED);
}
