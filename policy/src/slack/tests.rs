//! Lookups of budgets and costs, validation, and the text of a profile.

use proptest::prelude::*;

use super::content::{
    IOCB_BYTES_MAX, IOCBS_MAX, KERNELS_MAX, MICROS_MAX, SMS_MAX, TOKENS_MAX, USABLE_PERCENT_MIN, WINDOWS_MAX,
};
use super::*;

/// Window for any prefix.
pub(super) fn window(phase: Phase, min_input_tokens: u32, max_input_tokens: u32) -> Window {
    Window {
        phase,
        min_input_tokens,
        max_input_tokens,
        min_prefix_tokens: 0,
        max_prefix_tokens: TOKENS_MAX,
        layer_micros: 100,
        slack_micros: 55,
        free_sms: 4,
    }
}

pub(super) fn kernel(iocbs: u32, micros: u32, sms: u32) -> KernelTime {
    KernelTime { iocbs, micros, sms }
}

pub(super) fn content(windows: Vec<Window>) -> Content {
    let subject = Subject {
        model: "m".to_owned(),
        gpu_product: "g".to_owned(),
        tensor_parallel: 1,
        engine_version: "e".to_owned(),
    };
    let kernels = vec![kernel(1, 20, 2), kernel(4, 44, 4), kernel(8, 80, 4), kernel(16, 81, 8)];
    let measurement =
        Measurement { step_tokens: 8, iocb_bytes: 1 << 20, windows, reads: kernels.clone(), writes: kernels };
    let fallback = Fallback::ThrottleWrites;
    Content { subject, usable_percent: 80, fallback, max_error_percent: 30, measurement }
}

fn profile(windows: Vec<Window>) -> Profile {
    Profile::new(content(windows)).expect("a profile")
}

fn at(phase: Phase, input_tokens: u32, prefix_tokens: u32) -> Computation {
    Computation { phase, input_tokens, prefix_tokens }
}

use Phase::{Decode, Prefill};

#[test]
fn budget_is_the_usable_share_of_the_window_or_the_fallback() {
    let long = Window { min_prefix_tokens: 64, slack_micros: 100, ..window(Prefill, 8, 16) };
    let short = Window { max_prefix_tokens: 64, ..window(Prefill, 8, 16) };
    let whole = profile(vec![window(Decode, 0, 512), window(Decode, 4096, 8192), long, short]);
    let inside = |micros| Budget::Window { micros, io_sms: 4 };
    let outside = Budget::Outside(Fallback::ThrottleWrites);
    for (computation, expected) in [
        (at(Decode, 0, 9), inside(44)),
        (at(Decode, 511, 0), inside(44)),
        (at(Decode, 512, 0), outside),
        (at(Decode, 4096, 0), inside(44)),
        (at(Decode, 8192, 0), outside),
        (at(Decode, u32::MAX, 0), outside),
        (at(Decode, 0, u32::MAX), outside),
        (at(Prefill, 7, 0), outside),
        (at(Prefill, 8, 63), inside(44)),
        (at(Prefill, 8, 64), inside(80)),
        (at(Prefill, 16, 64), outside),
    ] {
        assert_eq!(whole.budget(computation), expected, "{computation:?}");
    }
    let none = profile(vec![Window { slack_micros: 1, ..window(Decode, 0, 1) }]);
    assert_eq!(none.budget(at(Decode, 0, 0)), outside, "no usable time is left");
    assert_eq!(none.window(at(Decode, 0, 0)).map(|window| window.layer_micros), Some(100));
    let long = Window { slack_micros: MICROS_MAX, layer_micros: MICROS_MAX, ..window(Decode, 0, TOKENS_MAX) };
    let all =
        Profile::new(Content { usable_percent: PERCENT_MAX, ..content(vec![long]) }).expect("a profile");
    assert_eq!(all.budget(at(Decode, TOKENS_MAX - 1, 0)), inside(MICROS_MAX), "the largest product fits");
}

#[test]
fn launch_size_and_cost_come_from_the_kernel_table() {
    let whole = profile(vec![window(Decode, 0, 8)]);
    let fitting = |micros, io_sms| whole.fitting(Direction::Read, Budget::Window { micros, io_sms });
    assert_eq!([fitting(19, 9), fitting(20, 9), fitting(43, 9), fitting(44, 4)], [0, 1, 1, 4]);
    assert_eq!([fitting(81, 8), fitting(81, 7), fitting(81, 3), fitting(81, 1)], [16, 8, 1, 0]);
    assert_eq!(whole.fitting(Direction::Write, Budget::Outside(Fallback::Ignore)), 0);
    let cost = |iocbs| whole.cost(Direction::Write, iocbs);
    for (iocbs, micros, sms) in [(0, 0, 0), (1, 20, 2), (2, 44, 4), (16, 81, 8), (17, 101, 8), (38, 242, 8)] {
        assert_eq!(cost(iocbs), KernelCost { micros, sms }, "{iocbs}");
    }
}

#[test]
fn fallback_decides_about_io_outside_of_windows() {
    use Fallback::{Ignore, PauseIo, ThrottleWrites};
    for (fallback, write, prefetch) in
        [(ThrottleWrites, false, true), (PauseIo, false, false), (Ignore, true, true)]
    {
        assert_eq!((fallback.admits(Io::Write), fallback.admits(Io::Prefetch)), (write, prefetch));
        assert!(fallback.admits(Io::AwaitedRead), "a request waits for it");
    }
}

fn error(change: impl FnOnce(&mut Content)) -> String {
    let mut changed = content(vec![window(Prefill, 0, 8), window(Decode, 0, 8)]);
    change(&mut changed);
    Profile::new(changed).expect_err("an invalid profile").to_string()
}

#[test]
fn rejects_invalid_windows_with_position_and_remedy() {
    let of = |change: fn(&mut Window)| error(move |content| change(&mut content.measurement.windows[1]));
    for (found, words) in [
        (error(|content| content.measurement.windows.clear()), "there are no windows: measure at least one"),
        (
            error(|content| content.measurement.windows = vec![window(Decode, 0, 1); WINDOWS_MAX + 1]),
            "there are 257 windows, and 256 are allowed",
        ),
        (of(|window| window.layer_micros = 0), "windows[1].layerMicros is 0: use 1 to 10000000"),
        (of(|window| window.free_sms = 257), "windows[1].freeSms is 257: use 0 to 256"),
        (
            of(|window| window.slack_micros = 101),
            "windows[1].slackMicros is 101, more than layerMicros (100)",
        ),
        (of(|window| window.max_input_tokens = TOKENS_MAX + 1), "windows[1].maxInputTokens"),
        (of(|window| window.min_input_tokens = 8), "set maxInputTokens above minInputTokens"),
        (of(|window| window.max_prefix_tokens = 0), "windows[1].maxPrefixTokens is 0"),
        (
            of(|window| (window.min_prefix_tokens, window.max_prefix_tokens) = (9, 9)),
            "set maxPrefixTokens above minPrefixTokens",
        ),
        (
            of(|window| (window.phase, window.min_input_tokens) = (Prefill, 7)),
            "windows[1].minInputTokens is 7: use a multiple of stepTokens (8)",
        ),
        (
            of(|window| window.phase = Prefill),
            "windows[1] and windows[0] of Prefill overlap: change the input or prefix lengths",
        ),
    ] {
        assert!(found.contains(words), "{found}");
    }
}

#[test]
fn rejects_invalid_kernels_and_shares_with_position_and_remedy() {
    for (found, words) in [
        (error(|content| content.usable_percent = 9), "usablePercent is 9: use 10 to 100"),
        (error(|content| content.max_error_percent = 0), "maxErrorPercent is 0: use 1 to 100"),
        (error(|content| content.measurement.step_tokens = 0), "stepTokens is 0: use 1 to 65536"),
        (error(|content| content.measurement.iocb_bytes = 0), "iocbBytes is 0"),
        (error(|content| content.measurement.writes.clear()), "there are no writes: measure at least one"),
        (
            error(|content| content.measurement.reads = vec![kernel(1, 1, 1); KERNELS_MAX + 1]),
            "there are 65 reads, and 64 are allowed: measure fewer IOCB counts",
        ),
        (error(|content| content.measurement.reads[0].iocbs = 0), "reads[0].iocbs is 0: use 1 to 65536"),
        (error(|content| content.measurement.writes[2].sms = 300), "writes[2].sms is 300"),
        (
            error(|content| content.measurement.reads[1].iocbs = 1),
            "reads[1] has iocbs 1 and micros 44, and the row before has 1 and 20: sort by iocbs",
        ),
        (error(|content| content.measurement.reads[1].micros = 19), "with times that do not decrease"),
    ] {
        assert!(found.contains(words), "{found}");
    }
}

#[test]
fn equal_measurements_have_equal_text_and_unknown_fields_are_rejected() {
    let (prefill, decode) = (window(Prefill, 0, 8), window(Decode, 0, 8));
    let text = |windows| serde_json::to_string(profile(windows).content()).expect("JSON");
    let one = text(vec![decode, prefill]);
    assert_eq!(one, text(vec![prefill, decode]));
    let row = |phase| {
        format!(r#"{{"phase":"{phase}","minInputTokens":0,"maxInputTokens":8,"minPrefixTokens":0,"#)
            + r#""maxPrefixTokens":16777217,"layerMicros":100,"slackMicros":55,"freeSms":4}"#
    };
    let kernels = r#"[{"iocbs":1,"micros":20,"sms":2},{"iocbs":4,"micros":44,"sms":4},"#.to_owned()
        + r#"{"iocbs":8,"micros":80,"sms":4},{"iocbs":16,"micros":81,"sms":8}]"#;
    let expected = format!(
        r#"{{"subject":{{"model":"m","gpuProduct":"g","tensorParallel":1,"engineVersion":"e"}},"usablePercent":80,"fallback":"ThrottleWrites","maxErrorPercent":30,"measurement":{{"stepTokens":8,"iocbBytes":1048576,"windows":[{},{}],"reads":{kernels},"writes":{kernels}}}}}"#,
        row("Prefill"),
        row("Decode"),
    );
    assert_eq!(
        one, expected,
        "agents of other versions read this: any change creates a new revision of every profile"
    );
    let read: Content = serde_json::from_str(&one).expect("it is read back");
    assert_eq!(read, *profile(vec![prefill, decode]).content());
    let more = one.replacen("\"usablePercent\"", "\"later\":1,\"usablePercent\"", 1);
    let error = serde_json::from_str::<Content>(&more).expect_err("unknown").to_string();
    assert!(error.contains("later"), "{error}");
}

#[test]
fn sixteen_of_the_largest_profiles_fit_one_config_map() {
    let windows = (0..WINDOWS_MAX as u32).map(|index| Window {
        min_prefix_tokens: TOKENS_MAX - 1 - WINDOWS_MAX as u32 + index,
        max_prefix_tokens: TOKENS_MAX - WINDOWS_MAX as u32 + index,
        layer_micros: MICROS_MAX,
        slack_micros: MICROS_MAX,
        free_sms: SMS_MAX,
        ..window(Prefill, TOKENS_MAX - 1, TOKENS_MAX)
    });
    let rows: Vec<KernelTime> =
        (0..KERNELS_MAX as u32).map(|index| kernel(IOCBS_MAX - 63 + index, MICROS_MAX, SMS_MAX)).collect();
    let mut largest = content(windows.collect());
    largest.measurement = Measurement {
        step_tokens: 1,
        iocb_bytes: IOCB_BYTES_MAX,
        reads: rows.clone(),
        writes: rows,
        ..largest.measurement
    };
    largest.subject.model = "m".repeat(253);
    let text = serde_json::to_string(Profile::new(largest).expect("a profile").content()).expect("JSON");
    assert!(16 * text.len() <= 896 << 10, "{} bytes", text.len());
}

proptest! {
    #[test]
    fn budget_never_exceeds_the_measurement(
        steps in proptest::collection::vec((0_u32..100, 1_u32..100, 1_u32..1000), 1..20),
        usable in USABLE_PERCENT_MIN..=PERCENT_MAX,
        tokens in 0_u32..5000,
        prefix in 0_u32..100,
    ) {
        let mut end = 0;
        let mut windows = Vec::new();
        for (gap, length, slack_micros) in steps {
            let min_tokens = end + gap;
            end = min_tokens + length;
            let whole = Window { slack_micros, layer_micros: 1000, ..window(Decode, min_tokens, end) };
            windows.push(Window { max_prefix_tokens: 50, ..whole });
        }
        let held = windows.iter().find(|window| window.contains(tokens, prefix)).copied();
        let all = Content { usable_percent: usable, ..content(windows) };
        let usable = u32::from(usable);
        match Profile::new(all).expect("a profile").budget(at(Decode, tokens, prefix)) {
            Budget::Window { micros, .. } => {
                let most = held.map_or(0, |window| window.slack_micros * usable);
                prop_assert!(micros > 0 && micros * 100 <= most);
            }
            Budget::Outside(_) => {
                let left = held.map_or(0, |window| window.slack_micros * usable / 100);
                prop_assert_eq!(left, 0);
            }
        }
    }
}
