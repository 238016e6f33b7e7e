//! Fuzz targets of the files that the agent reads (`make fuzz`): its configuration, slack profiles and pod bindings.

use reprise_policy::identity::PodBindings;

use crate::config::Config;
use crate::slack::profile_file;

#[test]
fn agent_config() {
    let small = "[session]\nsocket = '/x'\nmode = '0660'\n[[pool.devices]]\npci = '0000:3b:00.0'\nserial = 'S 1'\n\
                 [[tenants]]\nname = 'a'\ndram = { reserved = '1GiB', limit = '4GiB' }\n[tls]\nfolder = '/y'\n";
    let seeds = [
        Config::default_text().into_bytes(),
        small.as_bytes().to_vec(),
        b"[log]\nlevel = 'a=debug'".to_vec(),
    ];
    reprise_fuzz::check("agent_config", &seeds, config);
}

#[test]
fn agent_files() {
    let profile = r#"{"subject":{"model":"m","gpuProduct":"g","tensorParallel":1,"engineVersion":"v"},
        "usablePercent":80,"fallback":"ThrottleWrites","maxErrorPercent":20,"measurement":{"stepTokens":16,
        "iocbBytes":1048576,"windows":[{"phase":"Prefill","minInputTokens":16,"maxInputTokens":32,
        "minPrefixTokens":0,"maxPrefixTokens":64,"layerMicros":100,"slackMicros":50,"freeSms":8}],
        "reads":[{"iocbs":1,"micros":10,"sms":1}],"writes":[{"iocbs":1,"micros":20,"sms":1}]}}"#;
    let bindings = r#"{"tenants":["a"],"namespaces":{"chat":"a"},"serviceAccounts":{"n/s":"a"}}"#;
    let seeds = [profile, bindings].map(|text| text.as_bytes().to_vec());
    reprise_fuzz::check("agent_files", &seeds, file);
}

/// Parses and validates a configuration.
fn config(input: &[u8]) {
    let Ok(text) = std::str::from_utf8(input) else { return };
    if let Ok(config) = Config::parse(text)
        && let Err(error) = config.validate()
    {
        assert!(!error.chain().is_empty());
    }
}

/// Parses a file as a profile and as bindings.
fn file(input: &[u8]) {
    if let Err(error) = profile_file::parse(input) {
        assert!(!error.is_empty());
    }
    if let Ok(bindings) = serde_json::from_slice::<PodBindings>(input) {
        let written = serde_json::to_vec(&bindings).expect("bindings are JSON");
        assert_eq!(serde_json::from_slice::<PodBindings>(&written).expect("as written"), bindings);
    }
}
