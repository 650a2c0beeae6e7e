"use strict";
// Lets the search work on pages that are opened as files. Browsers refuse to start a worker from a
// file, so this stand-in runs the worker's script in a hidden frame. On a server it does nothing.

class FrameWorker extends EventTarget {
  constructor(url) {
    super();
    const frame = document.createElement("iframe");
    frame.hidden = true;
    document.body.append(frame);
    frame.contentDocument.open();
    frame.contentDocument.write("<!doctype html><body></body>");
    frame.contentDocument.close();
    this.inside = frame.contentWindow;
    this.ready = new Promise((resolve) => {
      this.inside.startWorker = resolve;
    });
    this.inside.postMessage = (data) => this.receive(data);
    this.inside.importScripts = (...urls) => this.load(urls);
    this.load([url]).then(() => this.inside.startWorker());
  }

  load(urls) {
    return urls.reduce((before, url) => before.then(() => new Promise((resolve, reject) => {
      const script = this.inside.document.createElement("script");
      script.src = url;
      script.onload = resolve;
      script.onerror = reject;
      this.inside.document.body.append(script);
    })), Promise.resolve());
  }

  receive(data) {
    const event = new MessageEvent("message", { data });
    this.dispatchEvent(event);
    this.onmessage?.(event);
  }

  postMessage(data) {
    this.ready.then(() => {
      this.inside.dispatchEvent(new MessageEvent("message", { data: structuredClone(data) }));
    });
  }
}

if (location.protocol === "file:") window.Worker = FrameWorker;
