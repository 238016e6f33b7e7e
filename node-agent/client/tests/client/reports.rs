//! Reports of layers that are started and polled.

use std::sync::mpsc;
use std::time::Duration;

use reprise_client::ClientError;
use reprise_policy::session::{LayerGuidance, LayerReport};
use reprise_policy::slack::{Computation, Phase};
use reprise_proto::local::{self, request, response};

use crate::fake_agent::{FakeAgent, LONG, Peer};

fn report() -> LayerReport {
    LayerReport {
        model: "llama".to_owned(),
        computation: Some(Computation { phase: Phase::Decode, input_tokens: 7, prefix_tokens: 900 }),
        previous_layer_micros: Some(110),
    }
}

/// Receives the report of this module.
fn expect_report(peer: &mut Peer) -> u64 {
    let (id, body) = peer.expect("a report");
    let expected = local::ReportLayer {
        model: "llama".to_owned(),
        phase: local::ComputePhase::ComputeDecode as i32,
        input_tokens: 7,
        prefix_tokens: 900,
        previous_layer_us: 110,
    };
    assert_eq!(body, request::Body::ReportLayer(expected));
    id
}

#[test]
fn report_does_not_wait_and_its_answer_can_be_polled_again() {
    let (answer, answer_signal) = mpsc::channel::<()>();
    let agent = FakeAgent::serve(move |peer| {
        let id = expect_report(peer);
        answer_signal.recv().expect("the test sends the signal");
        let reported =
            local::LayerReported { layer_us: 100, slack_us: 50, io_sms: 4, read_iocbs: 2, write_iocbs: 1 };
        peer.reply(id, response::Body::LayerReported(reported));
        peer.receive();
    });
    let client = agent.connect();
    let mut pending = client.start_layer_report(&report()).expect("sent");
    assert_eq!(pending.poll(Duration::ZERO).expect("no error"), None);
    answer.send(()).expect("the agent lives");
    let expected =
        LayerGuidance { layer_micros: 100, slack_micros: 50, io_sms: 4, read_iocbs: 2, write_iocbs: 1 };
    assert_eq!(pending.poll(LONG).expect("answered"), Some(expected));
    assert_eq!(pending.poll(Duration::ZERO).expect("known"), Some(expected));
    agent.end((client, pending));
}

#[test]
fn rejected_report_is_an_error_and_the_session_continues() {
    let agent = FakeAgent::serve(|peer| {
        let id = expect_report(peer);
        let failure = local::Failure {
            kind: local::FailureKind::BadRequest as i32,
            message: "report layer: invalid model".to_owned(),
        };
        peer.reply(id, response::Body::Failure(failure));
        let id = peer.expect_stats();
        peer.reply_stats(id);
    });
    let client = agent.connect();
    let error = client.report_layer(&report()).expect_err("rejected");
    assert!(matches!(&error, ClientError::BadRequest(text) if text.contains("invalid model")), "{error}");
    client.stats().expect("the session continues");
    agent.join();
}
