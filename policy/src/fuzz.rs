//! Fuzz targets of texts and encodings of this crate (`make fuzz`): recordings, profiles, layouts, keys, names and units.

use reprise_fuzz::Unstructured;

use crate::slack::{Computation, Content, Phase, Profile};
use crate::trace::{Line, Names, Requests};
use crate::{BlockKey, ByteSize, Interval, Layout, LayoutSpec, PciAddress, SlotSet, TenantName};

#[test]
fn policy_recordings() {
    let seed = r#"{"line":"start","version":1,"node":"n"}
{"line":"call","operation":"match","micros":5,"node":"n","session":1,"tenant":"a","block_tokens":16,"block_bytes":4096,"position":0,"keys":["00000000000000000000000000000001","00000000000000000000000000000002"]}
{"line":"call","operation":"save","micros":9,"node":"n","session":1,"tenant":"a","block_tokens":16,"block_bytes":4096,"parent":"00000000000000000000000000000002","keys":["00000000000000000000000000000003"]}
{"line":"end","node":"n","calls":2,"dropped":0}"#;
    reprise_fuzz::check("policy_recordings", &[seed.as_bytes().to_vec()], recording);
}

#[test]
fn policy_values() {
    let layout = LayoutSpec::LLAMA_3_8B.validate().expect("valid").encode();
    let texts =
        ["\x01team-a", "\x0116GiB", "\x011h 5m", "\x010000:3b:00.0", "\x0100000000000000000000000000000001"];
    let texts = texts.map(|text| text.as_bytes().to_vec());
    let profile = r#"{"subject":{"model":"m","gpuProduct":"g","tensorParallel":1,"engineVersion":"v"},"usablePercent":80,"fallback":"PauseIo","maxErrorPercent":20,"measurement":{"stepTokens":16,"iocbBytes":1048576,"windows":[{"phase":"Decode","minInputTokens":1,"maxInputTokens":32,"minPrefixTokens":0,"maxPrefixTokens":64,"layerMicros":100,"slackMicros":50,"freeSms":8}],"reads":[{"iocbs":1,"micros":10,"sms":1}],"writes":[{"iocbs":1,"micros":20,"sms":1}]}}"#;
    let seeds = [[&[0][..], &layout].concat(), [&[2][..], profile.as_bytes()].concat()];
    reprise_fuzz::check("policy_values", &[&seeds[..], &texts[..]].concat(), values);
}

/// Reads lines of a recording, and turns them into requests without names.
fn recording(input: &[u8]) {
    let (mut requests, mut names, mut keys) = (Requests::default(), Names::default(), 0);
    for line in input.split(|byte| *byte == b'\n') {
        let Ok(line) = serde_json::from_slice::<Line>(line) else { continue };
        let written = serde_json::to_vec(&line).expect("a line is JSON");
        assert_eq!(serde_json::from_slice::<Line>(&written).expect("as written"), line);
        if let Line::Call(call) = &line {
            keys += call.keys.len();
            requests.add(call);
        }
        names.replace(line);
    }
    let requests = requests.into_requests();
    assert!(requests.is_sorted_by_key(|request| request.micros));
    assert!(requests.iter().map(|request| request.prompt.len()).sum::<usize>() <= keys);
}

fn values(input: &[u8]) {
    let Some((kind, bytes)) = input.split_first() else { return };
    match kind % 3 {
        0 => encodings(bytes),
        1 => texts(bytes),
        _ => profile(bytes),
    }
}

fn encodings(bytes: &[u8]) {
    if let Some(layout) = bytes.first_chunk().and_then(Layout::decode) {
        assert_eq!(Layout::decode(&layout.encode()), Some(layout));
        assert!(layout.slot_bytes() >= layout.block_bytes());
        assert_eq!(layout.block_bytes(), layout.object_bytes() * u64::from(layout.objects()));
    }
    if let Some(keys) = BlockKey::unpack(bytes) {
        assert_eq!(BlockKey::pack(&keys), bytes);
    }
    if let Some(set) = SlotSet::from_bytes(bytes) {
        assert_eq!(set.to_bytes(), bytes);
    }
}

fn texts(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    if let Ok(name) = text.parse::<TenantName>() {
        assert_eq!(name.as_str().parse(), Ok(name));
    }
    if let Ok(size) = text.parse::<ByteSize>() {
        assert_eq!(size.to_string().parse::<ByteSize>().map(|size| size.0), Ok(size.0));
    }
    if let Ok(interval) = text.parse::<Interval>() {
        assert_eq!(interval.to_string().parse::<Interval>().map(|interval| interval.0), Ok(interval.0));
    }
    if let Ok(address) = text.parse::<PciAddress>() {
        assert_eq!(address.to_string().parse(), Ok(address));
    }
}

/// Validates a profile, and asks it for budgets.
fn profile(bytes: &[u8]) {
    let Ok(content) = serde_json::from_slice::<Content>(bytes) else { return };
    let Ok(profile) = Profile::new(content) else { return };
    let mut numbers = Unstructured::new(bytes);
    for phase in [Phase::Prefill, Phase::Decode] {
        let (input_tokens, prefix_tokens) =
            (numbers.arbitrary().unwrap_or(0), numbers.arbitrary().unwrap_or(u32::MAX));
        profile.budget(Computation { phase, input_tokens, prefix_tokens });
        for window in &profile.content().measurement.windows {
            let (input_tokens, prefix_tokens) = (window.min_input_tokens, window.min_prefix_tokens);
            profile.budget(Computation { phase, input_tokens, prefix_tokens });
        }
    }
}
