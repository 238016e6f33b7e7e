//! The end of an agent that is asked to stop.

use reprise_client::ClientError;

use crate::blocks::{connect, load_all, save};
use crate::process::{Config, Home};

#[test]
fn sigterm_writes_back_closes_sessions_and_removes_the_socket() {
    let home = Home::new();
    // A delay longer than the test: only the flush at the end can make the blocks durable.
    let slow = Config { extra: "[writeback]\ndelay = \"10s\"".to_owned(), ..Config::default() };
    let agent = home.start(&slow);
    let socket = agent.socket.clone();
    let client = connect(&socket);
    save(&client, 0..40);
    assert_eq!(agent.counter("nvme_blocks"), 0);
    let status = agent.terminate();
    assert_eq!(status.code(), Some(0), "{}", home.log_text());
    assert!(!socket.exists());
    let error = client.stats().expect_err("the session is over");
    assert!(matches!(error, ClientError::AgentLost { .. } | ClientError::Busy(_)), "{error}");
    let agent = home.start(&Config::default());
    load_all(&connect(&agent.socket), 0..40);
    assert_eq!(home.complaints(), Vec::<String>::new());
}
