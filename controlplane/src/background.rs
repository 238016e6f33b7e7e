//! Background tasks of a member. A permanent task that ends, and any task that panics, ends the member.
//!
//! Without the rule, a member with a dead task would look healthy while it no longer expires nodes, follows
//! the map or moves bytes. The process exits with an error that names the task, and its supervisor restarts
//! it. Its state can be rebuilt (docs/adr/0002).
//!
//! Tasks of one call or connection are not covered: their panic ends only that call or connection, and the
//! client retries. Lease keepers are not covered either: without one the lease expires, and the member
//! registers again.

use std::collections::BTreeMap;

use tokio::task::{Id, JoinError, JoinSet};

/// The background tasks of a member; aborted on drop.
#[derive(Debug, Default)]
pub struct Background {
    tasks: JoinSet<()>,
    running: BTreeMap<Id, Task>,
}

/// A running background task.
#[derive(Clone, Copy, Debug)]
struct Task {
    name: &'static str,
    kind: TaskKind,
}

/// Whether a task may end by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TaskKind {
    /// Runs as long as the member.
    Permanent,
    /// Ends when its work is done.
    Finite,
}

/// A task that ended although the member needs it.
#[derive(Debug, thiserror::Error)]
pub enum TaskExit {
    /// A permanent task returned.
    #[error("background task '{name}' ended: this is a bug, please report it")]
    TooEarly {
        /// Name of the task.
        name: &'static str,
    },
    /// A task panicked, or was aborted with its runtime.
    #[error("background task '{name}' failed: this is a bug, please report it")]
    Failed {
        /// Name of the task.
        name: &'static str,
        /// Panic message, or the abort.
        source: JoinError,
    },
}

impl Background {
    /// Starts a task that runs as long as the member.
    pub fn spawn_permanent(&mut self, name: &'static str, task: impl Future<Output = ()> + Send + 'static) {
        self.spawn(Task { name, kind: TaskKind::Permanent }, task);
    }

    /// Starts a task that may end when its work is done.
    pub fn spawn_finite(&mut self, name: &'static str, task: impl Future<Output = ()> + Send + 'static) {
        self.spawn(Task { name, kind: TaskKind::Finite }, task);
    }

    fn spawn(&mut self, info: Task, task: impl Future<Output = ()> + Send + 'static) {
        let id = self.tasks.spawn(task).id();
        self.running.insert(id, info);
    }

    /// Waits until a task fails. Cancel-safe.
    pub async fn next_failure(&mut self) -> TaskExit {
        loop {
            let Some(ended) = self.tasks.join_next_with_id().await else {
                return std::future::pending().await;
            };
            let id = ended.as_ref().map_or_else(JoinError::id, |(id, ())| *id);
            let Task { name, kind } = self.running.remove(&id).expect("spawn inserts every task");
            match (ended, kind) {
                (Err(source), _) => return TaskExit::Failed { name, source },
                (Ok(_), TaskKind::Permanent) => return TaskExit::TooEarly { name },
                (Ok(_), TaskKind::Finite) => {}
            }
        }
    }

    /// Aborts all tasks at their next await point.
    pub fn abort_all(&mut self) {
        self.tasks.abort_all();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::timeout;

    use super::*;

    #[tokio::test]
    async fn reports_a_panicked_task_with_its_name_and_message() {
        let mut background = Background::default();
        background.spawn_permanent("one", std::future::pending());
        background.spawn_finite("two", async { panic!("torn") });
        let ended = background.next_failure().await;
        assert!(matches!(&ended, TaskExit::Failed { name: "two", .. }), "{ended:?}");
        assert!(format!("{:#}", anyhow::Error::new(ended)).contains("torn"));
    }

    #[tokio::test]
    async fn reports_the_end_of_permanent_tasks_but_not_of_finite_ones() {
        let mut background = Background::default();
        background.spawn_finite("one", std::future::ready(()));
        let ended = timeout(Duration::from_millis(20), background.next_failure()).await;
        assert!(ended.is_err(), "a finite task may end");
        background.spawn_permanent("two", std::future::ready(()));
        assert!(matches!(background.next_failure().await, TaskExit::TooEarly { name: "two" }));
    }
}
