//! Fuzz targets of the files that users give to the simulator (`make fuzz`): traces, and profiles of hardware and models.

use crate::replay::{IdScope, ReadOptions, TraceBuilder, read_lines, read_session};
use crate::serving::profiles::{Model, NodeProfile};

#[test]
fn simulator_traces() {
    let lines = b"\x00{\"timestamp\":0,\"input_length\":600,\"output_length\":5,\"hash_ids\":[1,2],\"session\":1}\n\
        {\"timestamp\":9,\"input_length\":1024,\"output_length\":5,\"hash_ids\":[1,3],\"session\":4294967294,\"block_tokens\":512}\n";
    let session = b"\x01{\"block_size\":64,\"hash_id_scope\":\"local\",\"requests\":[{\"t\":0.5,\"in\":130,\"out\":7,\"hash_ids\":[1,2]},\
        {\"t\":1,\"requests\":[{\"t\":0,\"in\":64,\"out\":1,\"hash_ids\":[1]}]}]}";
    // A session without a number behind it.
    let last = b"\x00{\"timestamp\":0,\"input_length\":5,\"output_length\":5,\"hash_ids\":[1],\"session\":4294967295}";
    reprise_fuzz::check("simulator_traces", &[lines.to_vec(), session.to_vec(), last.to_vec()], trace);
}

#[test]
fn simulator_profiles() {
    let model = "name = 'm'\ntitle = 'M'\nparameters_billion = 8.0\nactive_parameters_billion = 8.0\nlayers = 32\nhidden = 4096\n\
        query_heads = 32\nquery_dim = 128\nvalue_dim = 128\ncontext = 131072\nsource = 's'\n[layout]\n";
    let seeds = [model.as_bytes().to_vec(), include_bytes!("../profiles/models/llama-3-8b.toml").to_vec()];
    reprise_fuzz::check("simulator_profiles", &seeds, profile);
}

/// Reads a trace, and asks for what commands ask. Laws: a reason, or a trace whose chains are whole.
fn trace(input: &[u8]) {
    let Some((kind, text)) = input.split_first() else { return };
    let scope = if kind & 2 == 0 { IdScope::Trace } else { IdScope::Session };
    let block_tokens = (kind & 4 != 0).then_some(16);
    let options = ReadOptions { scope, block_tokens, allow_gaps: kind & 8 != 0, sort: kind & 16 != 0 };
    let mut builder = TraceBuilder::new(options);
    let read =
        if kind & 1 == 0 { read_lines(text, &mut builder) } else { read_session("s", text, &mut builder) };
    if let Err(error) = read {
        return assert!(!error.to_string().is_empty());
    }
    let Ok(trace) = builder.finish("trace") else { return };
    let mut chain = Vec::new();
    for request in trace.requests() {
        trace.chain(request, &mut chain);
        assert_eq!(chain.len(), trace.len_of(request));
        assert!(request.session < trace.sessions(), "a session beyond their number");
    }
    assert!(trace.distinct() <= trace.references());
    trace.span_ms();
    if let Ok(copies) = trace.clone().copies(2, 1000, 7) {
        assert_eq!(copies.requests().len(), 2 * trace.requests().len());
    }
    let part = trace.of_sessions(1);
    assert!(part.requests().len() <= trace.requests().len());
}

/// Parses a text as a profile of a model and of a node.
fn profile(input: &[u8]) {
    let Ok(text) = std::str::from_utf8(input) else { return };
    match Model::parse("file", text) {
        Ok(model) => assert!(model.layout(16).is_ok(), "a model has a layout"),
        Err(error) => assert!(error.to_string().contains("file")),
    }
    if let Err(error) = NodeProfile::parse("file", text) {
        assert!(!error.to_string().is_empty());
    }
}
