//! The tasks that a member cannot do without, and the rule for them: whichever ends while it should run ends the member.
//!
//! A task that has panicked leaves a member that looks alive and does a part of its work no more: it buries no dead node,
//! follows no map, moves no bytes. What it knew can be had again (docs/adr/0002), so the process ends with an error that names
//! the task, and whoever supervises it starts another one.
//!
//! Not under the rule are tasks of one call or one connection: their panic ends that call or connection, and whoever
//! made it makes another. A lease's keeper is not either: a lease that nobody keeps is lost, and the member registers again.

use std::collections::BTreeMap;

use tokio::task::{Id, JoinError, JoinSet};

/// See the module. Dropped, it ends its tasks.
#[derive(Debug, Default)]
pub struct Background {
    tasks: JoinSet<()>,
    known: BTreeMap<Id, Known>,
}

/// A task that runs.
#[derive(Clone, Copy, Debug)]
struct Known {
    name: &'static str,
    lasts: Lasts,
}

/// How long a task is to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lasts {
    /// As long as the member.
    ForEver,
    /// Until it has done what it is for.
    UntilDone,
}

/// Which task has ended, and how.
#[derive(Debug, thiserror::Error)]
pub enum TaskEnded {
    /// It should have gone on.
    #[error("its task '{name}' has ended, which is a bug: please report it")]
    TooEarly {
        /// Which.
        name: &'static str,
    },
    /// It has panicked, or was ended with its runtime.
    #[error("its task '{name}' has failed, which is a bug: please report it")]
    Failed {
        /// Which.
        name: &'static str,
        /// With its words.
        source: JoinError,
    },
}

impl Background {
    /// Starts a task that runs as long as the member.
    pub fn for_ever(&mut self, name: &'static str, task: impl Future<Output = ()> + Send + 'static) {
        self.spawn(Known { name, lasts: Lasts::ForEver }, task);
    }

    /// Starts a task that may end when it has done what it is for.
    pub fn until_done(&mut self, name: &'static str, task: impl Future<Output = ()> + Send + 'static) {
        self.spawn(Known { name, lasts: Lasts::UntilDone }, task);
    }

    fn spawn(&mut self, known: Known, task: impl Future<Output = ()> + Send + 'static) {
        let id = self.tasks.spawn(task).id();
        self.known.insert(id, known);
    }

    /// Waits until a task ends that should not have; for ever while all is well. May be given up and called again.
    pub async fn ended(&mut self) -> TaskEnded {
        loop {
            let Some(ended) = self.tasks.join_next_with_id().await else {
                return std::future::pending().await;
            };
            let id = ended.as_ref().map_or_else(JoinError::id, |(id, ())| *id);
            let Known { name, lasts } = self.known.remove(&id).expect("it was noted when it was started");
            match (ended, lasts) {
                (Err(source), _) => return TaskEnded::Failed { name, source },
                (Ok(_), Lasts::ForEver) => return TaskEnded::TooEarly { name },
                (Ok(_), Lasts::UntilDone) => {}
            }
        }
    }

    /// Ends all tasks.
    pub fn end(&mut self) {
        self.tasks.abort_all();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::timeout;

    use super::*;

    #[tokio::test]
    async fn a_task_that_panics_is_named_with_its_words_whatever_the_others_do() {
        let mut background = Background::default();
        background.for_ever("one", std::future::pending());
        background.until_done("two", async { panic!("torn") });
        let ended = background.ended().await;
        assert!(matches!(&ended, TaskEnded::Failed { name: "two", .. }), "{ended:?}");
        assert!(format!("{:#}", anyhow::Error::new(ended)).contains("torn"));
    }

    #[tokio::test]
    async fn a_task_that_should_go_on_may_not_end_and_one_that_is_done_may() {
        let mut background = Background::default();
        background.until_done("one", std::future::ready(()));
        let ended = timeout(Duration::from_millis(20), background.ended()).await;
        assert!(ended.is_err(), "it was done");
        background.for_ever("two", std::future::ready(()));
        assert!(matches!(background.ended().await, TaskEnded::TooEarly { name: "two" }));
    }
}
